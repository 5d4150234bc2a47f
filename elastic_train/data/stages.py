"""Work that is done part by part and goes on where it was when it is killed: results lie in work files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from elastic_train.storage.errors import NotFound, StorageError
from elastic_train.storage.store import Store

if TYPE_CHECKING:
    from elastic_train.config.operation import StorageConfig

Result = TypeVar("Result")
Advance = Callable[[int], None]
Orders = Sequence[dict[str, Any]]
"""What is to be done: ``part`` (its number), ``bytes`` (for progress), and what the task wants to know beside."""


class Task(Protocol):
    """Does one order. What it returns depends on the order and the input alone. Can be sent to other machines."""

    def __call__(self, order: dict[str, Any], advance: Advance) -> bytes: ...


@dataclass(frozen=True, slots=True)
class KeptTask:
    """A task that puts its result into a work file before it returns it.

    ``optional``: it is returned also where no file can be written.
    """

    task: Task
    name: str
    work: str
    storage: StorageConfig | None
    optional: bool = False

    def __call__(self, order: dict[str, Any], advance: Advance) -> bytes:
        result = self.task(order, advance)
        with suppress(StorageError) if self.optional else nullcontext():
            Store.open(self.work, self.storage).write(self.file(order), [result])
        return result

    def file(self, order: dict[str, Any]) -> str:
        return f"{self.name}-{order['part']:05d}"


Run = Callable[[Task, Orders, Advance], Iterable[tuple[int, bytes]]]
"""Does orders: yields (number of the part, result) in any order and tells how many bytes are done."""


def one_by_one(task: Task, orders: Orders, advance: Advance) -> Iterator[tuple[int, bytes]]:
    """On this machine. The tokenizer uses all its cores by itself."""
    for order in orders:
        yield order["part"], task(order, advance)


def results(
    kept: KeptTask,
    orders: Orders,
    parse: Callable[[bytes], Result],
    usable: Callable[[Result], bool],
    run: Run,
    report: Callable[[int, int], None],
) -> list[Result]:
    """Parsed results of all orders, in their order.

    Those of an earlier run are taken where its work files can be parsed (no ``ValueError``) and are still ``usable``.
    ``report`` is called with (bytes done, bytes in all), at last with as many as there are.
    """
    total = sum(order["bytes"] for order in orders)
    found: dict[int, Result] = {}
    work = Store.open(kept.work, kept.storage)
    there = {entry.path for entry in work.list(f"{kept.name}-")}
    for order in orders:
        if kept.file(order) in there:
            try:
                earlier = parse(work.read(kept.file(order)))
            except (NotFound, ValueError):  # another run may have ended meanwhile and tidied up
                continue
            if usable(earlier):
                found[order["part"]] = earlier
    done = sum(order["bytes"] for order in orders if order["part"] in found)
    report(done, total)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report(done, total)

    for part, result in run(kept, [order for order in orders if order["part"] not in found], advance):
        found[part] = parse(result)
    report(total, total)
    return [found[order["part"]] for order in orders]
