"""What ``ray_internals.py`` and ``ray_nodes.py`` need of Ray beyond its public API.

A Ray upgrade that breaks any of it fails here by name.

After an upgrade: make these tests and ``test_ray_job.py`` pass, then add the version to ``TESTED_RAY_VERSIONS``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import ray

from elastic_train.controller.ray_versions import TESTED_RAY_VERSIONS

try:
    from ray._private import auto_init_hook
    from ray._private import worker as ray_worker
    from ray._private.state import GlobalState, available_resources_per_node, total_resources_per_node
    from ray._raylet import RAY_NODE_ID_KEY
    from ray.runtime_context import RuntimeContext
    from ray.train.constants import RAY_CHDIR_TO_TRIAL_DIR
    from ray.train.v2._internal import constants
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy
    from ray.train.v2._internal.execution.worker_group import (
        Worker,
        WorkerGroup,
        WorkerGroupPollStatus,
        WorkerGroupState,
        WorkerStatus,
    )
    from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
    from ray.train.v2.api.config import ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.util.placement_group import placement_group, placement_group_table

    from elastic_train.config.job import Job
    from elastic_train.controller.ray_connection import RAY_ENVIRONMENT, JobError
    from elastic_train.controller.ray_internals import (
        HostPolicy,
        ToleratesLostWorkers,
        host_trainer,
        ray_messages_to_log,
    )
    from elastic_train.controller.ray_nodes import HEAD_RESOURCE
    from elastic_train.controller.ray_queue import OtherJobs
    from elastic_train.controller.run import run_job
except ImportError as error:
    raise ImportError(
        f"what elastic_train needs of Ray is not there; versions that work: {TESTED_RAY_VERSIONS}"
    ) from error

HINT = f"Ray {ray.__version__} is not one of TESTED_RAY_VERSIONS={TESTED_RAY_VERSIONS}, or differs from them in this"


def expect(actual: object, wanted: object) -> None:
    assert actual == wanted, HINT


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def fields(kind: type) -> set[str]:
    assert dataclasses.is_dataclass(kind), HINT
    return {field.name for field in dataclasses.fields(kind)}


def test_version() -> None:
    assert ray.__version__ in TESTED_RAY_VERSIONS, HINT


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("ray.train.v2._internal.execution.callback", "WorkerGroupCallback"),
        ("ray.train.v2._internal.execution.scaling_policy", "ResizeDecision"),
        ("ray.train.v2.api.data_parallel_trainer", "DataParallelTrainer"),
    ],
)
def test_another_ray_is_refused_with_the_versions_that_work(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    """Before a cluster is started or asked: none is there to be found."""
    monkeypatch.delattr(sys.modules[module], name)
    monkeypatch.delitem(sys.modules, "elastic_train.controller.ray_internals")
    with pytest.raises(JobError, match=rf"Ray \S+ lacks .*{name}.*; versions that work: 2\.60\.0"):
        run_job(job(), address="127.0.0.1:1")


def test_hooks_and_their_parameters() -> None:
    expect(parameters(WorkerGroupCallback.after_worker_group_poll_status), ["self", "worker_group_status"])
    expect(parameters(ScalingPolicy.__init__), ["self", "scaling_config"])
    expect(parameters(ScalingPolicy.after_controller_start), ["self", "train_run_context"])
    for name in ("before_controller_shutdown", "before_controller_abort"):
        # They may only withdraw a request, of which there is none without a client.
        assert "_cancel_resource_request" in getattr(ScalingPolicy, name).__code__.co_names, HINT
    assert "_coordinator_client" in ScalingPolicy.__init__.__code__.co_names, HINT
    used = ScalingPolicy.after_controller_start.__code__.co_names
    expect({"_requester_id", "_coordinator_client", "_send_resource_request"} - set(used), set())
    for name, wanted in {
        "make_decision_for_non_running_worker_group": ["self"],
        "make_decision_for_running_worker_group": ["self", "worker_group_state", "worker_group_status"],
        "_get_num_workers_for_resource_request": ["self"],
    }.items():
        expect(parameters(getattr(ScalingPolicy, name)), wanted)
        expect(parameters(getattr(HostPolicy, name)), wanted)
        assert name in ScalingPolicy.__abstractmethods__, HINT
    expect(HostPolicy.__abstractmethods__, frozenset())
    expect(fields(ResizeDecision), {"num_workers", "resources_per_worker"})
    expect(fields(NoopDecision), set())


def test_a_group_is_made_from_the_label_selectors_of_the_runs_own_scaling_config() -> None:
    expect(RAY_NODE_ID_KEY, "ray.io/node-id")
    source = inspect.getsource(TrainController._start_worker_group)
    assert "self._train_run_context.scaling_config" in source, HINT
    assert "._label_selector_per_worker(num_workers)" in source, HINT
    scaling = ScalingConfig(num_workers=3, resources_per_worker={"CPU": 1})
    scaling.label_selector = [{RAY_NODE_ID_KEY: "a"}, {RAY_NODE_ID_KEY: "b"}]
    expect(scaling._label_selector_per_worker(2), [{RAY_NODE_ID_KEY: "a"}, {RAY_NODE_ID_KEY: "b"}])
    assert "bundle_label_selector=worker_group_context.label_selector" in inspect.getsource(WorkerGroup), HINT


def test_worker_group() -> None:
    assert {"running", "error", "return_value"} <= fields(WorkerStatus), HINT
    assert "worker_statuses" in fields(WorkerGroupPollStatus), HINT
    assert {"workers", "placement_group_handle"} <= fields(WorkerGroupState), HINT
    assert "placement_group_bundle_index" in fields(Worker), HINT
    assert isinstance(inspect.getattr_static(PlacementGroupHandle, "placement_group"), property), HINT


class Polled(WorkerGroup):
    """A worker group that is asked for its status without a cluster."""

    def __init__(self, callback: WorkerGroupCallback, *statuses: WorkerStatus) -> None:
        self._callbacks = [callback]
        self._worker_rank_to_replica_group_rank = None
        self._statuses = list(statuses)

    def _assert_active(self) -> None:
        pass

    def _poll_workers_and_collect_errors(self, timeout: float | None) -> list[WorkerStatus]:
        return self._statuses


def dead() -> WorkerStatus:
    return WorkerStatus(running=False, error=RuntimeError("killed"))


def returned(value: str) -> WorkerStatus:
    return WorkerStatus(running=False, return_value=value)


def test_controller_sees_what_the_callback_made_of_the_poll() -> None:
    status = Polled(ToleratesLostWorkers(), dead(), WorkerStatus(running=True)).poll_status()
    expect(status.errors, {})
    expect(status.finished, False)
    expect(Polled(ToleratesLostWorkers(), dead(), returned("finished")).poll_status().finished, True)
    source = inspect.getsource(TrainController._step)
    assert source.index("_poll_workers") < source.index("_is_training_succeeded"), HINT
    assert source.index("_is_training_succeeded") < source.index("make_decision_for_running_worker_group"), HINT


def test_group_without_workers_runs_until_the_job_is_over() -> None:
    callback = ToleratesLostWorkers()
    status = Polled(callback, dead(), returned("the lease ran out")).poll_status()
    assert not status.finished
    assert not status.errors
    status.worker_statuses[1].return_value.over = True
    assert Polled(callback, dead(), dead()).poll_status().finished


def job() -> Job:
    return Job.model_validate(
        {
            "name": "contract",
            "model": {
                "hidden_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "intermediate_size": 8,
                "vocab_size": 8,
            },
            "data": {"uri": "nowhere", "sequence_length": 4},
            "training": {"steps": 1, "global_batch": 1},
            "hosts": {"min": 1, "max": 3, "cpus": 2.0},
        }
    )


def test_end_of_controller_needs_no_request_for_resources() -> None:
    policy = HostPolicy(
        ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}), 1, 1, 0.0, str, id, OtherJobs("", id)
    )
    policy.before_controller_abort()
    asyncio.run(policy.before_controller_shutdown())
    expect(policy._coordinator_client, None)


def test_nodes_can_be_drained_and_the_head_be_told_from_the_others() -> None:
    from ray._common.constants import HEAD_NODE_RESOURCE_NAME
    from ray._raylet import InnerGcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    assert callable(InnerGcsClient.drain_node), HINT  # GcsClient passes it on
    assert DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), HINT
    expect(HEAD_NODE_RESOURCE_NAME, HEAD_RESOURCE)
    assert "timestamps in ms" in (GlobalState.get_draining_nodes.__doc__ or ""), HINT
    assert "0" in (GlobalState.get_draining_nodes.__doc__ or "").splitlines()[-2], HINT  # no deadline


def test_fit_takes_our_policy_and_callback(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    monkeypatch.setenv(constants.V2_ENABLED_ENV_VAR, "1")
    trainer = host_trainer(job(), str, on_controller=id, others=OtherJobs("", id), folder=os.fspath(tmp_path))
    (callback,) = trainer.run_config.callbacks or []
    assert isinstance(callback, ToleratesLostWorkers), HINT
    expect(trainer.run_config.failure_config.max_failures, -1)
    kinds = [p.kind for p in inspect.signature(DataParallelTrainer._initialize_and_run_controller).parameters.values()]
    expect(kinds, [inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_KEYWORD])
    assert "self._initialize_and_run_controller(" in inspect.getsource(DataParallelTrainer.fit), HINT
    assert {"scaling_policy", "callbacks"} <= set(parameters(TrainController.__init__)), HINT
    expect(trainer.scaling_config._resources_per_worker_not_none, {"CPU": 2.0})
    assert isinstance(trainer.scaling_config, ScalingConfig), HINT


def test_names_from_ray_core() -> None:
    assert callable(available_resources_per_node), HINT
    assert callable(total_resources_per_node), HINT
    expect(parameters(ray.util.list_named_actors), ["all_namespaces"])
    assert list(inspect.signature(placement_group_table).parameters) == ["placement_group"], HINT
    assert '"bundles_to_node_id"' in inspect.getsource(GlobalState._gen_placement_group_info), HINT
    assert {"bundles", "strategy", "lifetime"} <= set(parameters(placement_group)), HINT
    expect(inspect.signature(placement_group).parameters["lifetime"].default, None)
    assert "current_actor" in dir(RuntimeContext), HINT
    assert issubclass(ray.exceptions.RayActorError, ray.exceptions.RayError), HINT


def test_environment_variables() -> None:
    known = {
        constants.V2_ENABLED_ENV_VAR,
        constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR,
        constants.ENABLE_PREEMPTION_WATCHER_ENV_VAR,
        RAY_CHDIR_TO_TRIAL_DIR,
        "RAY_worker_niceness",  # read by the raylet
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
        "RAY_ENABLE_AUTO_CONNECT",
    }
    expect(known - set(RAY_ENVIRONMENT), set())
    expect(set(RAY_ENVIRONMENT) - known, set())
    assert "RAY_ENABLE_AUTO_CONNECT" in inspect.getsource(auto_init_hook), HINT


def test_what_ray_prints_is_logged(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    expect(parameters(ray_worker.print_to_stdstream), ["data", "ignore_prefix"])
    assert "print_to_stdstream" in ray_worker.listen_error_messages.__code__.co_names, HINT
    message = {"lines": ["The node has been marked dead"], "pid": "raylet", "is_err": False}
    with caplog.at_level(logging.INFO), ray_messages_to_log():
        ray_worker.print_to_stdstream(message, ignore_prefix=False)
    assert caplog.messages == ["raylet: The node has been marked dead"]
    assert capsys.readouterr().out == ""
    ray_worker.print_to_stdstream(message, ignore_prefix=False)
    assert "marked dead" in capsys.readouterr().out
