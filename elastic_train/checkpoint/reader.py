"""Fills a rank's shards from saved parts of any layout: nearest copy first, checked, the next copy on failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from elastic_train.checkpoint.description import Chunk
from elastic_train.checkpoint.errors import CheckpointError, DamagedChunk, ImageError, RestoreError
from elastic_train.checkpoint.fetch import Fetched, Part, Read, fetch, reads_of, requests
from elastic_train.checkpoint.plan import Need, plan
from elastic_train.checkpoint.sources import ImageSource
from elastic_train.parallel.shard import LocalShard

__all__ = ["Part", "Restored", "restore"]


@dataclass(slots=True)
class Restored:
    """What ``restore`` did: bytes moved by kind of source, and a sentence for each source that had to be passed over.

    Bytes of images are those that were copied out of them; of partners and storage those that were sent, with what was
    read over between two pieces, the rest of a checksum's block, and what had to be read again.
    """

    bytes_read: Counter[str] = field(default_factory=Counter)
    passed_over: list[str] = field(default_factory=list)


def restore(
    state: Mapping[str, LocalShard],
    parts: Sequence[Part],
    *,
    rank: int = 0,
    expected_keys: Collection[str] | None = None,
    threads: int = 4,
    on_progress: Callable[[], None] = lambda: None,
) -> Restored:
    """Copies into the tensors of ``state`` what they need of ``parts``, which must all be of one step and generation.

    Several parts may hold the same chunk: the nearest copy is read, and the next one when that cannot be read, is
    damaged, or was overwritten meanwhile. Of equally near copies rank r prefers the r-th, so that the ranks do not all
    read from one host. With ``expected_keys`` (all keys of the job, over all pipeline stages) saved keys beyond them
    are errors. ``threads`` read from hosts and storage at a time. ``on_progress`` is called after each request, by any
    thread.

    Raises RestoreError (before anything is copied) when keys, dtypes, shapes or regions do not fit; DamagedChunk,
    SourceError or ImageError when no copy of a needed chunk can be read: the state is then partly overwritten.
    """
    restoration = _Restoration(state, parts, rank, threads, on_progress)
    pending = plan(state, parts, expected_keys)
    while pending:
        pending = restoration.read(pending)
        if not pending:
            pending = restoration.overwritten()
    return restoration.result()


class _Restoration:
    """What has been read from where, and which copies turned out to be no good."""

    def __init__(
        self,
        state: Mapping[str, LocalShard],
        parts: Sequence[Part],
        rank: int,
        threads: int,
        on_progress: Callable[[], None],
    ) -> None:
        self._state = state
        self._parts = parts
        self._rank = rank
        self._threads = threads
        self._on_progress = on_progress
        self._unusable: set[int] = set()
        self._spoilt: set[tuple[int, int]] = set()
        self._moved: Counter[str] = Counter()
        self._views: dict[int, list[Read]] = {}
        self._passed_over: dict[str, None] = {}

    def read(self, needs: Sequence[Need]) -> list[Need]:
        """Reads the best copy that is left of each; returns those to be read from another one."""
        reads = self._choose(needs)
        failed = self._execute(reads)
        again: dict[int, Need] = {}
        for read, error in failed:
            self._give_up(read, error)
            again[id(read.need)] = read.need
        for read in reads:
            if isinstance(self._parts[read.part].source, ImageSource) and id(read.need) not in again:
                self._views.setdefault(read.part, []).append(read)
        return list(again.values())

    def overwritten(self) -> list[Need]:
        """What was copied out of images that have been written over since, and so may be a mix of two steps."""
        needs = []
        for part in list(self._views):
            source = self._parts[part].source
            assert isinstance(source, ImageSource)
            try:
                source.check()
            except ImageError as error:
                for read in self._views.pop(part):
                    self._give_up(read, error)
                    needs.append(read.need)
        return needs

    def result(self) -> Restored:
        views = Counter({ImageSource.kind: sum(read.nbytes for reads in self._views.values() for read in reads)})
        return Restored(self._moved + views, list(self._passed_over))

    def _give_up(self, read: Read, error: CheckpointError) -> None:
        read.need.error = error
        if isinstance(error, DamagedChunk):
            self._spoilt.add((read.part, read.index))
        else:
            self._unusable.add(read.part)
        self._passed_over[str(error)] = None

    def _choose(self, needs: Sequence[Need]) -> list[Read]:
        """The copy to read of each chunk. Chunks with the same equally near copies are dealt out to these in runs."""
        groups: dict[tuple[int, ...], list[tuple[Need, list[tuple[int, int]]]]] = {}
        for need in needs:
            copies = self._nearest(need)
            groups.setdefault(tuple(p for p, _ in copies), []).append((need, copies))
        reads: list[Read] = []
        for group in groups.values():
            total = sum(self._chunk(copies[0]).nbytes for _, copies in group)
            done = 0
            for need, copies in group:
                place = copies[(done * len(copies) // total + self._rank) % len(copies)]
                reads += reads_of(need, self._parts[place[0]], place)
                done += self._chunk(place).nbytes
        return reads

    def _nearest(self, need: Need) -> list[tuple[int, int]]:
        """The nearest copies of those that are left; raises what was wrong with the last one when there are none."""
        copies = [place for place in need.copies if place[0] not in self._unusable and place not in self._spoilt]
        if not copies:
            raise need.error or RestoreError([f"no source is left for {need.key}"])
        nearest = min(self._parts[p].source.distance for p, _ in copies)
        return [place for place in copies if self._parts[place[0]].source.distance == nearest]

    def _chunk(self, place: tuple[int, int]) -> Chunk:
        return self._parts[place[0]].description.chunks[place[1]]

    def _execute(self, reads: Sequence[Read]) -> list[tuple[Read, CheckpointError]]:
        """Does the reads and copies; returns those that failed. Images are read here, the rest in a few threads."""
        near: list[list[Read]] = []
        far: list[list[Read]] = []
        for run in requests(self._parts, reads):
            (near if isinstance(self._parts[run[0].part].source, ImageSource) else far).append(run)
        lost: dict[int, CheckpointError] = {}
        failed: list[tuple[Read, CheckpointError]] = []

        def do(run: list[Read]) -> Fetched:
            part = run[0].part
            if part in lost:  # each further request to a host that is gone would take its whole timeout
                return Fetched(0, [(read, lost[part]) for read in run])
            fetched = fetch(self._state, self._parts[part], run)
            self._on_progress()
            for _, error in fetched.failed:
                if not isinstance(error, DamagedChunk):
                    lost[part] = error
            return fetched

        with ThreadPoolExecutor(max(1, min(self._threads, len(far)))) as pool:
            outcomes = pool.map(do, far)
            for run in near:
                failed += do(run).failed
            for run, fetched in zip(far, outcomes, strict=True):
                failed += fetched.failed
                self._moved[self._parts[run[0].part].source.kind] += fetched.nbytes
        return failed
