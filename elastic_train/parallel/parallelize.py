"""The whole of N-dimensional training on one screen: which axis acts on the model, in which order."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.config.job import ModelConfig
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.data import apply_data_parallel
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.pipeline import stage_layers
from elastic_train.parallel.tensor import apply_tensor_parallel


@dataclass(frozen=True)
class ParallelModel:
    """One rank's part of the model and the global shapes of the parameters in it."""

    module: Transformer
    global_shapes: dict[str, tuple[int, ...]]


def parallelize(*, config: ModelConfig, mesh: ParallelMesh) -> ParallelModel:
    """Cut the model along every axis; the parameters are on ``mesh.device``, with uninitialised values."""
    layout, place = mesh.layout, mesh.place
    model = Transformer(
        config,
        layers=stage_layers(config.num_hidden_layers, layout.pp, place.pp),
        first=place.pp == 0,
        last=place.pp == layout.pp - 1,
    )
    global_shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    # Tensor parallelism first: FSDP then cuts what each tensor rank is left with, and gathers only that.
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh)
    if layout.data_ranks > 1:
        apply_data_parallel(model, mesh)
    # Memory is allocated last, so that no rank ever holds more than its own part.
    model.to_empty(device=mesh.device)
    model.tie()
    return ParallelModel(model, global_shapes)
