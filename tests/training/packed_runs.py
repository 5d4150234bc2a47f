"""What a rank does with samples of a real data set."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.data.samples import Sample
from elastic_train.data.sources import open_training
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.context import apply_context_parallel
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.training.engine import Engine


def first_step(rank: int, job: Job, layout: Layout) -> tuple[float, int, float]:
    """Loss, valid tokens and gradient norm of the first step from the initial weights."""
    engine = Engine(job, layout, rank, open_training(job).batches)
    engine.initialize()
    gradients = engine.compute_gradients(1)
    return gradients.loss, gradients.valid_tokens, gradients.norm


def logits(
    rank: int, job: Job, layout: Layout, samples: list[Sample]
) -> tuple[list[int], list[npt.NDArray[np.float32]]]:
    """Places that this rank holds, and the logits there of each sample, with fixed random weights in fp32."""
    model = Transformer(job.model).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    model.sequence_length = job.data.sequence_length
    if layout.cp > 1:
        apply_context_parallel(model, job, ParallelMesh(layout, rank, torch.device("cpu")))
    places = torch.arange(job.data.sequence_length) if model.indices_T is None else model.indices_T
    found = []
    with torch.no_grad():
        for sample in samples:
            ids, documents = (torch.from_numpy(array)[None] for array in (sample.input_ids, sample.documents))
            found.append(model(ids[:, places], documents)[0].numpy())
    return places.tolist(), found
