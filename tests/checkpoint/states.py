"""Global states cut into the shards of many layouts; no process group, since each rank plans for itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from elastic_train.checkpoint.capture import Capture
from elastic_train.checkpoint.catalog import commit
from elastic_train.checkpoint.checksums import BLOCK_BYTES
from elastic_train.checkpoint.claims import FRESH, Claim, newest_claim, take_claim
from elastic_train.checkpoint.image import Image, image_name
from elastic_train.checkpoint.manifest import Manifest, merge, object_path
from elastic_train.checkpoint.reader import Part
from elastic_train.checkpoint.sources import ImageSource
from elastic_train.checkpoint.upload import assign_chunks, upload_image
from elastic_train.parallel.shard import LocalShard
from elastic_train.storage.store import Store

Global = dict[str, torch.Tensor]
State = dict[str, LocalShard]


def some_tensors(seed: int) -> Global:
    """Sizes that divide nothing, one dim to three, several dtypes, a scalar."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "param.embed.weight": normal(257, 12),
        "exp_avg.embed.weight": normal(257, 12),
        "param.layers.0.q.weight": normal(30, 21),
        "param.layers.1.q.weight": normal(30, 21),
        "param.layers.0.norm.weight": normal(7),
        "param.layers.1.cube": normal(5, 3, 4),
        "param.half": normal(11, 6).bfloat16(),
        "count": torch.tensor([2**40 + seed]),
        "scalar": torch.tensor(1.5 + seed),
    }


def cut(full: torch.Tensor, cuts: Sequence[Sequence[int]], index: Sequence[int]) -> LocalShard:
    """The cell ``index`` of the grid that ``cuts`` (inner cut points per dim) makes of ``full``; may be empty."""
    offsets, shard = [], full
    for dim, (inner, place) in enumerate(zip(cuts, index, strict=True)):
        edges = [0, *inner, full.shape[dim]]
        offsets.append(edges[place])
        shard = shard.narrow(dim, edges[place], edges[place + 1] - edges[place])
    return LocalShard(shard.clone(memory_format=torch.contiguous_format), tuple(full.shape), tuple(offsets))


def random_layout(full: Global, rng: random.Random) -> list[State]:
    """The states of all ranks of a random layout: every dim cut at random (repeated cuts give empty shards),

    some tensors on some ranks only (pipeline stages), some replicated.
    """
    ranks = rng.randint(1, 6)
    states: list[State] = [{} for _ in range(ranks)]
    for key, tensor in full.items():
        cuts: list[list[int]] = [[] for _ in tensor.shape]
        cells = 1
        while cuts and cells < ranks and rng.random() < 0.8:
            dim = rng.randrange(len(cuts))
            cuts[dim] = sorted([*cuts[dim], rng.randint(0, tensor.shape[dim])])
            cells = 1
            for inner in cuts:
                cells *= len(inner) + 1
        indices = list(itertools.product(*(range(len(inner) + 1) for inner in cuts)))
        order = rng.sample(range(ranks), ranks)
        holders = ranks if rng.random() < 0.7 else rng.randint(min(len(indices), ranks), ranks)
        if len(indices) > ranks:  # more cells than ranks: keep the tensor whole
            cuts, indices = [[] for _ in tensor.shape], [tuple(0 for _ in tensor.shape)]
        for place, rank in enumerate(order[:holders]):
            states[rank][key] = cut(tensor, cuts, indices[place % len(indices)])
    return states


def even_layout(full: Global, ranks: int, dim: int = 0) -> list[State]:
    """``torch.chunk`` of every tensor along ``dim`` (its last ranks may be empty); scalars are replicated."""
    states: list[State] = []
    for rank in range(ranks):
        state = {}
        for key, tensor in full.items():
            at = min(dim, tensor.ndim - 1)
            size = -(-tensor.shape[at] // ranks) if tensor.ndim else 0
            inner = [
                [min(size * r, tensor.shape[at]) for r in range(1, ranks)] if d == at else []
                for d in range(tensor.ndim)
            ]
            state[key] = cut(tensor, inner, [rank if d == at else 0 for d in range(tensor.ndim)])
        states.append(state)
    return states


def emptied(state: State) -> State:
    """The same shards full of other values."""
    return {
        key: LocalShard(torch.full_like(shard.tensor, -7), shard.global_shape, shard.offsets)
        for key, shard in state.items()
    }


def same(left: State, right: State) -> bool:
    """Equal keys, places and bits."""
    return left.keys() == right.keys() and all(
        left[key].offsets == right[key].offsets and torch.equal(left[key].tensor, right[key].tensor) for key in left
    )


def write_images(
    directory: Path, states: Sequence[State], step: int, generation: int = 1, buffer: int = 0
) -> list[Path]:
    """One whole image per rank."""
    paths = []
    for rank, state in enumerate(states):
        capture = Capture(state)
        image = Image.create(directory / image_name(generation, rank, buffer), generation, rank, capture.description)
        capture.write(image, step)
        paths.append(image.path)
    return paths


def image_parts(paths: Sequence[Path], step: int) -> list[Part]:
    return [Part(Image.open(path).description(), ImageSource(path, step)) for path in paths]


def save(
    store: Store, images: Path, states: Sequence[State], step: int, generation: int = 1, model: object = None
) -> Manifest:
    """Uploads without committing; the manifest is what a coordinator would commit."""
    paths = write_images(images, states, step, generation)
    return upload_images(store, paths, step, generation, model=model)


def upload_images(
    store: Store,
    paths: Sequence[Path],
    step: int,
    generation: int = 1,
    attempt: str = "",
    claim: int = 1,
    model: object = None,
    batch: int = 8,
) -> Manifest:
    """What the hosts of all ranks do with their whole images, and the manifest of it. Needs no torch.

    ``batch``: samples a step.
    """
    descriptions = {rank: Image.open(path).description() for rank, path in enumerate(paths)}
    uploads = []
    for rank, indices in assign_chunks(descriptions).items():
        path = object_path(step, generation, rank, attempt)
        upload = upload_image(Image.open(paths[rank]), step, descriptions[rank], indices, store, path)
        if upload.nbytes:
            uploads.append(upload)
    tensors, objects = merge(uploads)
    return Manifest(
        step=step,
        claim=claim,
        created=1.7e9,
        metrics={},
        block_bytes=BLOCK_BYTES,
        cursor=step * batch,
        generation=generation,
        seed=1,
        layout={"dp_shard": len(paths)},
        config_digest="c",
        data_digest="d",
        model=model or {},
        versions={"torch": "2"},
        objects=objects,
        tensors=tensors,
    )


def save_and_commit(store: Store, images: Path, states: Sequence[State], step: int, generation: int = 1) -> Manifest:
    manifest = save(store, images, states, step, generation)
    assert commit(store, manifest, first_claim(store)).created
    return manifest


def first_claim(store: Store) -> Claim:
    """Claim 1 on the job folder, which is taken when nobody has it."""
    return newest_claim(store) or take_claim(store, FRESH, "test", 1.7e9)
