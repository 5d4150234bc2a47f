"""How many hosts the policy starts with, on a real cluster, and that what it wished for meanwhile is given back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_train.controller.local_cluster import LocalCluster
from tests.controller.processes import Program, program
from tests.ray_job import refill

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

ROUNDS = 6
POLICY = """
import json, sys, time
import ray
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2.api.config import ScalingConfig
from ray.util import placement_group_table
from elastic_train.controller.ray_internals import HostPolicy
from elastic_train.controller.ray_nodes import free_seats
from elastic_train.controller.ray_queue import OtherJobs

def decide(policy):
    while not isinstance(decision := policy.make_decision_for_non_running_worker_group(), ResizeDecision):
        pass
    return decision.num_workers

class Others(OtherJobs):
    def __init__(self, lacking=0):
        super().__init__("", id)
        self.lacking = lacking

    def waiting(self):
        return {"other": self.lacking} if self.lacking else {}

def policy(minimum, maximum, wait, lacking=0):
    scaling = ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1})
    return HostPolicy(scaling, minimum, maximum, wait, str, id, Others(lacking))

@ray.remote(num_cpus=1)
class Busy:
    def there(self):
        return True

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
before = len(placement_group_table())  # those of jobs that have ended are told of, too
found = {"at once": decide(policy(1, 4, 60.0)), "groups made": len(placement_group_table()) - before}
found["beside jobs that lack 2 and 4"] = [decide(policy(1, 4, 0.0, lacking)) for lacking in (2, 4)]
found["freed meanwhile"] = []
for number in range(int(sys.argv[2])):
    busy = [Busy.remote() for _ in range(4)]
    ray.get([each.there.remote() for each in busy])
    waiting = policy(2, 4, 60.0)
    waiting.make_decision_for_non_running_worker_group()
    for each in busy:  # any of them may be the one that the group just needed
        ray.kill(each)
    found["freed meanwhile"].append(decide(waiting))
    deadline = time.monotonic() + 20
    while free_seats({"CPU": 1}).total() < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
found["seats"] = free_seats({"CPU": 1}).total()
print(json.dumps(found))
"""


def test_no_wish_is_made_for_seats_that_are_free_and_none_is_removed_while_it_is_placed(
    ray_cluster: LocalCluster,
) -> None:
    refill(ray_cluster, nodes=2, cpus=2)
    with program(POLICY, ray_cluster.address, str(ROUNDS)) as asked:
        found = json.loads(asked.hear())
    assert found.pop("beside jobs that lack 2 and 4") == [2, 1]
    assert found == {"at once": 4, "groups made": 0, "freed meanwhile": [4] * ROUNDS, "seats": 4}


DRAINED = """
import json, sys, time
from pathlib import Path
from types import SimpleNamespace
import ray
from ray.train.v2._internal.execution.worker_group import WorkerStatus
from ray.train.v2.api.config import ScalingConfig
from ray.util import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from elastic_train.controller.ray_internals import HostPolicy, Lost
from elastic_train.controller.ray_nodes import drain_node, free_seats
from elastic_train.controller.ray_queue import OtherJobs

SEAT, PLACE = {"CPU": 1}, Path(sys.argv[2])

@ray.remote(num_cpus=1)
class Worker:
    def node(self):
        return ray.get_runtime_context().get_node_id()

def run_host():
    PLACE.write_text(ray.get_runtime_context().get_node_id())
    time.sleep(600)

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
group = placement_group([SEAT] * 2, strategy="STRICT_SPREAD")
in_bundle = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=1)
worker = Worker.options(scheduling_strategy=in_bundle).remote()
node = ray.get(worker.node.remote())
assert node == placement_group_table(group)["bundles_to_node_id"][1]

policy = HostPolicy(ScalingConfig(num_workers=2, resources_per_worker=SEAT), 1, 2, 0.0, run_host, id, OtherJobs("", id))
workers = [SimpleNamespace(placement_group_bundle_index=index) for index in (0, 1)]
state = SimpleNamespace(workers=workers, placement_group_handle=SimpleNamespace(placement_group=group))

def decide():
    statuses = {0: WorkerStatus(running=True), 1: WorkerStatus(running=False, return_value=Lost())}
    policy.make_decision_for_running_worker_group(state, SimpleNamespace(worker_statuses=statuses))
    return policy._joiners[1]

assert decide().in_bundle  # and waits there, as the worker has not gone
free = free_seats(SEAT).total()
assert drain_node(node, 300.0, "test") == ""
ray.kill(worker)
deadline = time.monotonic() + 60
while decide().in_bundle and time.monotonic() < deadline:
    time.sleep(0.1)
ray.get(decide().started, timeout=60)
again = decide()
while not (PLACE.exists() and PLACE.read_text()) and time.monotonic() < deadline:
    time.sleep(0.05)
for _ in range(3):
    assert decide() is again
there = PLACE.read_text()
found = {"elsewhere": there != node, "free": free, "then": free_seats(SEAT).total()}
assert drain_node(next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU") and n["NodeID"]
                       not in (there, *placement_group_table(group)["bundles_to_node_id"].values())), 300.0, "") == ""
print(json.dumps(found | {"when that is drained too": free_seats(SEAT).total()}))
"""


def test_a_host_is_not_asked_for_on_a_node_that_is_being_drained(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    """Not until the node is dead, but now: there are free seats on others."""
    refill(ray_cluster, nodes=4, cpus=1)
    try:
        with program(DRAINED, ray_cluster.address, str(tmp_path / "node")) as asked:
            found = json.loads(asked.hear())
    finally:
        for node in ray_cluster.nodes[1:]:  # nobody else is to be placed on them
            ray_cluster.kill_node(node)
    assert found == {"elsewhere": True, "free": 2, "then": 1, "when that is drained too": 0}


ENDING = """
import json, sys, time
from pathlib import Path
from types import SimpleNamespace
import ray
from ray.train.v2._internal.execution.worker_group import WorkerStatus
from ray.train.v2.api.config import ScalingConfig
from ray.util import placement_group
from elastic_train.controller.ray_internals import HostPolicy, ToleratesLostWorkers
from elastic_train.controller.ray_queue import OtherJobs

SEAT, FOLDER = {"CPU": 1}, Path(sys.argv[2])

def run_host():
    (FOLDER / "up").touch()
    while not (FOLDER / "go").exists():
        time.sleep(0.01)
    return "finished"

def wait(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
group = placement_group([SEAT] * 2)
ray.get(group.ready())
policy = HostPolicy(ScalingConfig(num_workers=2, resources_per_worker=SEAT), 1, 3, 0.0, run_host, id, OtherJobs("", id))
HostPolicy._of_this_process = policy  # as in the controller that starts with it
workers = [SimpleNamespace(placement_group_bundle_index=index) for index in (0, 1)]
state = SimpleNamespace(workers=workers, placement_group_handle=SimpleNamespace(placement_group=group))
callback = ToleratesLostWorkers()

def poll(*statuses):
    polled = SimpleNamespace(worker_statuses=dict(enumerate(statuses)))
    callback.after_worker_group_poll_status(polled)
    policy.make_decision_for_running_worker_group(state, polled)
    return any(status.running for status in polled.worker_statuses.values())

def dead():
    return WorkerStatus(running=False, error=RuntimeError("killed"))

assert poll(WorkerStatus(running=True), dead())
wait((FOLDER / "up").exists)
seats = sorted(policy._joiners)
ended = WorkerStatus(running=False, return_value="finished") if sys.argv[3] == "worker" else dead()
waits = [poll(ended, dead()) for _ in range(3)]
left = sorted(policy._joiners)
(FOLDER / "go").touch()
wait(lambda: not poll(ended, dead()))
print(json.dumps({"seats": seats, "waits": waits, "left": left}))
"""


@pytest.mark.parametrize("ended", ["worker", "replacement"])
def test_a_group_is_not_over_before_the_replacements_have_returned(
    ray_cluster: LocalCluster, tmp_path: Path, ended: str
) -> None:
    """Else they would be killed, with what they have in shared memory. One that has no seat is not waited for."""
    refill(ray_cluster, nodes=1, cpus=2)
    with program(ENDING, ray_cluster.address, str(tmp_path), ended) as asked:
        found = json.loads(asked.hear())
    left = [1] if ended == "worker" else [0, 1, 2]  # nobody knows of the end yet, and rank 0 is replaced, too
    assert found == {"seats": [1, 2], "waits": [True] * 3, "left": left}


LOST = """
import json, sys, time
from types import SimpleNamespace
import ray
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2._internal.execution.worker_group import WorkerStatus
from ray.train.v2.api.config import ScalingConfig
from ray.util import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from elastic_train.controller.ray_internals import HostPolicy, Lost
from elastic_train.controller.ray_queue import OtherJobs

@ray.remote(num_cpus=1)
class Worker:
    def node(self):
        return ray.get_runtime_context().get_node_id()

def run_host():
    time.sleep(600)

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
scaling = ScalingConfig(num_workers=3, resources_per_worker={"CPU": 1})
policy = HostPolicy(scaling, 1, 3, 0.0, run_host, id, OtherJobs("", id))
while not isinstance(decision := policy.make_decision_for_non_running_worker_group(), ResizeDecision):
    pass
selectors = scaling._label_selector_per_worker(decision.num_workers)
group = placement_group([{"CPU": 1}] * decision.num_workers, bundle_label_selector=selectors)
ray.get(group.ready())
places = [PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=i) for i in range(3)]
nodes = [ray.get(Worker.options(scheduling_strategy=place).remote().node.remote()) for place in places]
addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
print(json.dumps({"nodes": nodes, "address": addresses[nodes[2]]}), flush=True)
sys.stdin.readline()  # the node of one or two of them is killed

workers = [SimpleNamespace(placement_group_bundle_index=index) for index in range(3)]
state = SimpleNamespace(workers=workers, placement_group_handle=SimpleNamespace(placement_group=group))
lost = [index for index in range(3) if nodes[index] == nodes[2]]

def decide():
    statuses = {i: WorkerStatus(running=i not in lost, return_value=Lost() if i in lost else None) for i in range(3)}
    policy.make_decision_for_running_worker_group(state, SimpleNamespace(worker_statuses=statuses))
    return [index not in policy._joiners or policy._joiners[index].in_bundle for index in lost]

deadline = time.monotonic() + 120
while any(decide()) and time.monotonic() < deadline:
    time.sleep(0.1)
table = placement_group_table(group)
placed = [bool(node) for node in table["bundles_to_node_id"].values()]
print(json.dumps({"in bundles": decide(), "lost": lost, "placed": placed, "state": table["stats"]["scheduling_state"]}))
"""


def test_what_a_lost_node_had_is_asked_for_outside_the_group_whose_bundles_ray_lets_rest(
    ray_cluster: LocalCluster,
) -> None:
    """Ray would else try all the time to place them on nodes that have not enough left: a core of the head is busy."""
    refill(ray_cluster, nodes=2, cpus=2)
    with program(LOST, ray_cluster.address) as asked:
        told = said(asked)
        nodes = told["nodes"]
        assert sorted(map(nodes.count, set(nodes))) == [1, 2]
        ray_cluster.kill_node(next(node for node in ray_cluster.nodes if node.address == told["address"]))
        asked.tell()
        found = said(asked)
    lost = [index for index in range(3) if nodes[index] == nodes[2]]
    kept = [index not in lost for index in range(3)]
    assert found == {"in bundles": [False] * len(lost), "lost": lost, "placed": kept, "state": "INFEASIBLE"}


def said(asked: Program) -> dict[str, Any]:
    """What a program prints, without what Ray prints about the lost node."""
    while not (line := asked.hear()).startswith("{"):
        pass
    return dict(json.loads(line))
