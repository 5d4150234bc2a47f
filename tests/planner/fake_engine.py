"""The real engine of any rank of any layout in one process: tensors without data, collectives that move nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic_train.config.job import Job
from elastic_train.config.layout import Coordinates, Layout
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.training import engine as engine_module
from elastic_train.training.engine import Engine, StepGradients
from tests.training.synthetic import SyntheticBatches


class Ledger(TorchDispatchMode):
    """Bytes of the live storages that were made while it was on: ``now``, and ``most`` at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._resize = torch.UntypedStorage.resize_

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                self._note(local.untyped_storage())
        return result

    def __enter__(self) -> Any:
        # FSDP2 frees and allocates by resizing, which is no operation on tensors.
        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", lambda *given: self._resized(*given))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def _resized(self, storage: torch.UntypedStorage, size: int) -> Any:
        result = self._resize(storage, size)
        self._note(storage)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        reference = weakref.ref(storage, self._gone)
        size = storage.nbytes()
        self.now += size - self._sizes.get(reference, 0)
        self._sizes[reference] = size
        self.most = max(self.most, self.now)

    def _gone(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self.now -= self._sizes.pop(reference, 0)


@dataclass(frozen=True)
class Case:
    """A rank to build; ``steps``: how many to run on it."""

    job: Job
    layout: Layout
    place: Coordinates
    steps: int = 0


@dataclass(frozen=True)
class Held:
    """Bytes: of the engine as it was built, after its steps, and at most during the last one."""

    built: int
    after: int
    most: int


def hold(rank: int, cases: list[Case]) -> list[Held]:
    """What the engine of every case holds. For ``run_ranks`` with one rank, whose process group is replaced."""
    return [_hold(case) for case in cases]


def _hold(case: Case) -> Held:
    dist.destroy_process_group()
    rank, layout = rank_of(case.layout, case.place), case.layout
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    with fake_tensors(), Ledger() as ledger:
        engine = Engine(case.job, layout, rank, SyntheticBatches(case.job))
        gc.collect()
        built = ledger.now
        for step in range(1, case.steps + 1):
            ledger.most = ledger.now
            _step(engine, step)
        gc.collect()
        return Held(built, ledger.now, ledger.most)


def _step(engine: Engine, step: int) -> None:
    """``train_step`` without what reads numbers: the count of tokens, loss and norm."""
    batches = engine._load(step)
    engine._data.start_step()
    if engine._pipeline is None:
        engine._run_micro_batches(batches)
    else:
        engine._pipeline.run(batches)
    gradients = engine._gradients()
    engine.update(step, StepGradients(loss=1.0, norm=2.0, valid_tokens=1, shards=gradients))


def rank_of(layout: Layout, place: Coordinates) -> int:
    for rank in range(layout.world_size):
        if layout.coordinates(rank) == place:
            return rank
    raise ValueError(f"{place} is outside {layout}")


@contextmanager
def fake_tensors() -> Iterator[None]:
    mode = FakeTensorMode()
    swap = torch.utils.swap_tensors

    def forget_and_swap(first: Tensor, second: Tensor) -> None:
        # The mode remembers parameters by weak references, with which torch does not swap them.
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(first, second)

    def real_mesh(*arguments: Any) -> ParallelMesh:
        # Ranks are numbers that are read.
        with unset_fake_temporarily():
            mesh = ParallelMesh(*arguments)
            mesh.fsdp, mesh.stage_group  # noqa: B018
            return mesh

    def agree(schedule: Any, stages: list[Any], has_backward: bool, done: bool) -> None:
        # The ranks of a pipeline ask each other whether shapes are known, and read the answer. They are.
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    with (
        mode,
        mock.patch.object(_PipelineSchedule, "_warmup_p2p", agree),
        mock.patch.object(torch.utils, "swap_tensors", forget_and_swap),
        mock.patch.object(engine_module, "ParallelMesh", real_mesh),
    ):
        yield
