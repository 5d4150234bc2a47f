"""Is a committed checkpoint still whole? Decided once, by the coordinator, before any rank loads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from elastic_train.checkpoint.catalog import read_catalog
from elastic_train.checkpoint.errors import CheckpointError, Damage, DamagedChunk, SourceError
from elastic_train.checkpoint.manifest import FOLDER, CheckpointId, ChunkRecord, Manifest, read_manifest
from elastic_train.checkpoint.sources import ObjectSource
from elastic_train.checkpoint.verified import read_verified
from elastic_train.storage.store import Entry, Store

Depth = Literal["sizes", "full"]
"""``sizes``: every object is there with its exact size (one LIST). ``full``: every chunk has its checksum."""
READ_BYTES = 16 * 2**20
"""Read at once, unless a block is larger: neighbouring chunks together, a large chunk in pieces."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """``manifest`` is None when there is nothing to load; ``refused`` has a sentence for each newer one passed over."""

    manifest: Manifest | None
    refused: list[str] = field(default_factory=list)
    refused_ids: list[CheckpointId] = field(default_factory=list)


def choose_checkpoint(
    store: Store, verify: Depth = "sizes", step: int | None = None, exclude: Collection[CheckpointId] = ()
) -> Chosen:
    """The newest checkpoint that is whole and not in ``exclude``, or exactly that of ``step``.

    ``exclude`` is for checkpoints in which a rank has found a DamagedChunk while it loaded. Raises CheckpointError when
    ``step`` is given and has no whole checkpoint (the sentence names the object), StorageError or SourceError when
    storage does not answer: that says nothing about a checkpoint.
    """
    catalog = read_catalog(store)
    if step is not None:
        manifest = read_manifest(store, catalog.find(step))
        damages = check(store, manifest, verify, catalog.entries)
        if damages:
            raise CheckpointError(_refusal(step, damages))
        return Chosen(manifest)
    refused: list[tuple[CheckpointId, str]] = []
    chosen = None
    for candidate in reversed([checkpoint for checkpoint in catalog.committed if checkpoint not in exclude]):
        try:
            manifest = read_manifest(store, candidate)
            damages = check(store, manifest, verify, catalog.entries)
            if not damages:
                chosen = manifest
                break
            refused.append((candidate, _refusal(candidate.step, damages)))
        except SourceError:
            raise
        except CheckpointError as error:
            refused.append((candidate, str(error)))
    newest, known = chosen.step if chosen else -1, {checkpoint.step for checkpoint in catalog.committed}
    sentences = [
        f"step {s} is incomplete (generation {g} uploaded objects but no manifest) and is ignored"
        for s, g in sorted(catalog.attempts, reverse=True)
        if s > newest and s not in known
    ]
    return Chosen(chosen, sentences + [sentence for _, sentence in refused], [checkpoint for checkpoint, _ in refused])


def check(store: Store, manifest: Manifest, verify: Depth, entries: Iterable[Entry] | None = None) -> list[Damage]:
    """What is wrong with the objects of ``manifest``: by size (from ``entries``, a LIST, when given) or in full."""
    damages = wrong_sizes(manifest, store.list(f"{FOLDER}step-") if entries is None else entries)
    return damages if damages or verify == "sizes" else verify_checkpoint(store, manifest)


def wrong_sizes(manifest: Manifest, entries: Iterable[Entry]) -> list[Damage]:
    """Objects that are missing or have another size than the manifest says."""
    sizes = {entry.path: entry.size for entry in entries}
    damages = []
    for path, nbytes in manifest.objects.items():
        actual = sizes.get(path)
        if actual != nbytes:
            found = "no such object" if actual is None else f"{actual} bytes"
            damages.append(Damage(path, "", 0, nbytes, f"{nbytes} bytes", found))
    return damages


def verify_checkpoint(
    store: Store, manifest: Manifest, progress: Callable[[int], None] = lambda nbytes: None, threads: int = 4
) -> list[Damage]:
    """Reads every chunk and compares its checksum; an empty list means that all are right.

    ``progress`` is called from several threads with the number of bytes just checked. Raises SourceError when storage
    does not answer.
    """
    step = max(READ_BYTES // manifest.block_bytes, 1) * manifest.block_bytes
    by_object: dict[str, list[_Piece]] = {}
    for key, record in manifest.tensors.items():
        for chunk in record.chunks:
            for begin in range(0, chunk.nbytes, step):
                piece = _Piece(key, chunk, begin, min(begin + step, chunk.nbytes))
                by_object.setdefault(chunk.object, []).append(piece)
    runs = [(path, run) for path, pieces in by_object.items() for run in _runs(pieces)]

    def verify_run(job: tuple[str, list[_Piece]]) -> list[Damage]:
        path, run = job
        damages = _verify_run(store, manifest.block_bytes, path, run)
        progress(sum(piece.end - piece.begin for piece in run))
        return damages

    with ThreadPoolExecutor(threads) as pool:
        return [damage for damages in pool.map(verify_run, runs) for damage in damages]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes ``[begin, end)`` of a chunk of tensor ``key``, read at once."""

    key: str
    chunk: ChunkRecord
    begin: int
    end: int

    @property
    def place(self) -> tuple[int, int]:
        """Byte range in the object."""
        return self.chunk.byte_offset + self.begin, self.chunk.byte_offset + self.end


def _runs(pieces: list[_Piece]) -> Iterable[list[_Piece]]:
    """Neighbouring pieces of one object, together up to ``READ_BYTES``."""
    run: list[_Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.place):
        if run and piece.place[1] - run[0].place[0] > READ_BYTES:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _verify_run(store: Store, block_bytes: int, path: str, run: list[_Piece]) -> list[Damage]:
    begin, end = run[0].place[0], max(piece.place[1] for piece in run)
    try:
        data = ObjectSource(store, path).read(begin, end - begin).data
    except DamagedChunk:
        data = None
    damages = []
    for piece in run:
        first, last = piece.place
        held = None if data is None else data[first - begin : last - begin]
        if held is None or any(piece.chunk.checksums(block_bytes).wrong(piece.begin, held)):
            damages += _damage_of(store, block_bytes, piece)
    return damages


def _damage_of(store: Store, block_bytes: int, piece: _Piece) -> list[Damage]:
    """Reads the piece again, block by block: what was spoilt on the way is right now, the rest has its exact place."""
    damages = []
    for begin in range(piece.begin, piece.end, block_bytes):
        try:
            read_verified(store, piece.key, piece.chunk, block_bytes, begin, min(begin + block_bytes, piece.end))
        except DamagedChunk as error:
            damages.append(error.damage)
    return damages


def _refusal(step: int, damages: list[Damage]) -> str:
    more = f" (and {len(damages) - 1} more)" if len(damages) > 1 else ""
    return f"the checkpoint of step {step} is damaged: {damages[0]}{more}"
