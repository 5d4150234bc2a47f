"""What the ranks of the tests of the data axes do."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.parallel import token_exchange
from elastic_train.training.engine import Engine, StepGradients
from tests.training.synthetic import SyntheticBatches


def live_bytes() -> int:
    """Bytes of the storages of all tensors that this process holds, each storage counted once."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    # A gradient may exist in C++ only, where the collector does not see it.
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    storages = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in local if not part.is_meta
    }
    return sum(storages.values())


def _after_barrier() -> int:
    dist.barrier()
    return live_bytes()


def persistent_bytes(rank: int, runs: list[tuple[Job, Layout]]) -> list[int]:
    """What lives between two steps because of the engine, of every run."""
    gc.freeze()  # what the process started with is not looked at: that would touch every page of its parent's memory
    held = []
    for job, layout in runs:
        before = live_bytes()
        engine = Engine(job, layout, rank, SyntheticBatches(job))
        engine.initialize()
        for step in (1, 2):
            engine.train_step(step)
        # A thread of gloo may hold the buffers of a finished collective for a moment longer.
        held.append(min(_after_barrier() for _ in range(5)) - before)
        del engine
    return held


class Watch(TorchDispatchMode):
    """Calls ``observe`` after every operation, of the backward pass too."""

    def __init__(self, observe: Callable[[], None]) -> None:
        super().__init__()
        self._observe = observe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._observe()
        return result


def most_whole_weights(rank: int, job: Job, layout: Layout) -> tuple[int, list[int]]:
    """Elements of gathered weights during a step: most at once; and those of each unit of FSDP2, the rest last."""
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    units = [module for stage in engine._stages.modules for module in (*stage.blocks.values(), stage)]
    states = [unit._get_fsdp_state() for unit in units]
    # One group per unit; torch 2.13 keeps a list.
    groups = [getattr(state, "_fsdp_param_group", None) or state._fsdp_param_groups[0] for state in states]
    most = 0

    def gathered(group: Any) -> int:
        parts = [part for p in group.fsdp_params for part in getattr(p, "all_gather_outputs", [])]
        ready = sum(part.untyped_storage().nbytes() // part.itemsize for part in parts)
        under_way = group._all_gather_result
        return ready or (under_way.all_gather_output.numel() if under_way is not None else 0)

    def observe() -> None:
        nonlocal most
        most = max(most, sum(map(gathered, groups)))

    with Watch(observe):
        engine.train_step(1)
    return most, [sum(p._orig_size.numel() for p in group.fsdp_params) for group in groups]


def most_whole_gradients(rank: int, job: Job, layout: Layout) -> tuple[int, list[int]]:
    """Elements of whole gradients during a step, in ``.grad`` and being scattered: most at once; and per bucket."""
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    buckets = engine._data._buckets
    parameters = [parameter for _, parameter in engine._stages.named_parameters()]
    most = 0

    def observe() -> None:
        nonlocal most
        scattering = sum(matrix.numel() for _, matrix, _, _ in buckets[0]._under._pending)
        most = max(most, scattering + sum(p.grad.numel() for p in parameters if p.grad is not None))

    with Watch(observe):
        engine.train_step(1)
    return most, [sum(member.parameter.numel() for member in bucket._members) for bucket in buckets]


def order_of_events(rank: int, job: Job, layout: Layout) -> list[str]:
    """``gradient`` when one arrives, ``reduce`` when a collective on gradients starts, ``end`` after all backwards."""
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    events: list[str] = []
    for _, parameter in engine._stages.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    all_reduce, collect = dist.all_reduce, engine._data.gradients

    def observed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op"):
            events.append("reduce")
        return all_reduce(tensor, *args, **kwargs)

    def ended() -> dict[str, Tensor]:
        events.append("end")
        return collect()

    dist.all_reduce, engine._data.gradients = observed, ended  # type: ignore[method-assign]
    engine.compute_gradients(1)
    return events


def step_without(rank: int, job: Job, layout: Layout, name: str, on: tuple[int, ...]) -> str:
    """The error of a step in which parameter ``name`` takes no part, on the ranks ``on``."""
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    if rank in on:
        (stage,) = engine._stages.modules
        path, _, _ = name.rpartition(".")
        norm = stage.get_submodule(path)
        norm.forward = lambda x: x  # type: ignore[method-assign]
    try:
        engine.compute_gradients(1)
    except RuntimeError as error:
        return str(error)
    return ""


def constant_gradient(
    rank: int, job: Job, layout: Layout, gradient: float, steps: int
) -> tuple[dict[str, float], dict[str, float], set[str]]:
    """Set every weight to 1, update ``steps`` times with one gradient; means of master and compute weights, dtypes."""
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    for shard in engine._data.shards.values():
        shard.tensor.fill_(1.0)
    engine.publish()
    computed = engine.compute_gradients(1)
    for value in computed.shards.values():
        value.fill_(gradient)
    for step in range(1, steps + 1):
        shards = {name: value.clone() for name, value in computed.shards.items()}
        engine.update(step, StepGradients(1.0, 1.0, 1, shards))
    shards = {name: shard.tensor for name, shard in engine._data.shards.items() if shard.tensor.numel()}
    masters = {name: float(shard.double().mean()) for name, shard in shards.items()}
    weights, dtypes = compute_weights(engine)
    return masters, weights, dtypes


def compute_weights(engine: Engine) -> tuple[dict[str, float], set[str]]:
    """Means and dtypes of the weights as the forward pass sees them."""
    seen: dict[str, float] = {}
    dtypes: set[str] = set()

    def look(module: nn.Module, *_: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            dtypes.add(str(parameter.dtype))
            seen[f"{names[module]}.{name}"] = float(parameter.detach().double().mean())

    names = {module: name for stage in engine._stages.modules for name, module in stage.named_modules()}
    for module in names:
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(look)
    engine.compute_gradients(1)
    return seen, dtypes


def activation_dtypes(rank: int, job: Job, layout: Layout) -> tuple[set[str], set[str], set[str]]:
    """dtypes of what blocks put out, of the rotary tables, and of what collectives move between tensor ranks."""
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    blocks: set[str] = set()
    moved: set[str] = set()
    for _, block in engine._stages.blocks():
        block.register_forward_hook(lambda _, __, output: blocks.add(str(output.dtype)))
    gather = token_exchange.all_gather_single

    def observed(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        moved.add(str(output.dtype))
        return gather(output, *args, **kwargs)

    token_exchange.all_gather_single = observed
    engine.compute_gradients(1)
    tables = engine._stages.modules[0].rotary.tables(job.data.sequence_length, torch.device("cpu"))
    return blocks, {str(table.dtype) for table in tables}, moved
