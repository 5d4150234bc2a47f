"""The parts of a preparation as a Ray Data pipeline over a cluster."""

from __future__ import annotations

import json
import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastic_train.data.errors import DataError
from elastic_train.storage.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_train.data.stages import Advance, Orders, Run, Task


@contextmanager
def cluster_runner(address: str) -> Iterator[Run]:
    """Does orders on the Ray cluster at ``address``, one per CPU at a time; connected for the time of the context.

    A node that dies takes only what it had in its hands: Ray gives that to another one. Which node does what, and when
    it is done, changes nothing in the results. Raises :class:`DataError` when there is no cluster.
    """
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        raise DataError(f"no Ray cluster at {address!r}: {error}") from error
    try:
        yield _run
    finally:
        ray.shutdown()


def _run(task: Task, orders: Orders, advance: Advance) -> Iterator[tuple[int, bytes]]:
    if not orders:
        return
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows = ray.data.from_items([{"order": json.dumps(order)} for order in orders], override_num_blocks=len(orders))
    sizes = {order["part"]: order["bytes"] for order in orders}
    for row in rows.map(_Worker(task), num_cpus=1).iter_rows():
        if row["problem"]:
            raise StorageError(row["uri"], row["problem"]) if row["uri"] else DataError(row["problem"])
        advance(sizes[row["part"]])
        yield row["part"], row["result"]


@dataclass(frozen=True, slots=True)
class _Worker:
    """A task as a function of rows. What is wrong with the input is no failure of the worker, to be tried again."""

    task: Task

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker has one CPU
        order = json.loads(row["order"])
        done = {"part": order["part"], "result": b"", "problem": "", "uri": ""}
        try:
            return {**done, "result": self.task(order, lambda count: None)}
        except DataError as error:
            return {**done, "problem": str(error)}
        except StorageError as error:
            return {**done, "problem": error.cause, "uri": error.uri}
