"""How the coordinator's decisions grow with the number of hosts: simulated hosts, real coordinator, one process.

Each size: all hosts join and get ready, the first generation is formed and finishes a step, then one host in a hundred
is lost at once. ``decide`` is the CPU-bound time from the first loss to the last assignment, 0.03 s of it the wait for
further losses; ``join`` is per host; ``step`` is all that is told of one step; ``restore`` is the time to tell every
rank of the new layout which images it needs, ``blocked`` the longest that anybody else waited for the event loop
meanwhile; ``return`` is what a coordinator that comes back takes to adopt a generation that has done a step without it,
all of it on the event loop; ``plan`` is what a thread takes, once per generation, to spread the chunks
over the ranks that upload them, and ``orders`` is all that the event loop does when a checkpoint is due. Sizes are
those of the largest message. ``beat_us`` is the CPU time that the coordinator needs for a heartbeat over a real link
and its answer, ``beats_cores`` that for all that come in a second (``beats_per_s``) with the default settings.

    python benchmarks/control_plane.py [--hosts 100 1000 10000] [--json control_plane.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from elastic_train.checkpoint.description import Chunk, Description
from elastic_train.config.job import Job
from elastic_train.config.load import parse_job
from elastic_train.config.operation import FailureConfig
from elastic_train.controller.checkpointer import Save
from elastic_train.controller.coordinator import Coordinator
from elastic_train.controller.lease import heartbeat_seconds
from elastic_train.data.corpus import open_corpus
from elastic_train.data.prepare import prepare

PER_NODE = 8
ROWS = 1 << 20
CHUNKS = 60
"""Of a rank: a few layers' weights with their two moments."""
JOB = """
name: control-plane
model: {{hidden_size: 64, num_hidden_layers: 16, num_attention_heads: 8, num_key_value_heads: 8,
         intermediate_size: 128, vocab_size: 304}}
data: {{uri: '{data}', sequence_length: 8}}
training: {{steps: 10, global_batch: {batch}, micro_batch: 1}}
parallel: {{tp: 8, pp: 4, dp_shard: auto}}
hosts: {{min: 32, max: {hosts}, settle_seconds: 0, start_wait_seconds: 0}}
storage: {{uri: '{storage}'}}
tracking: {{enabled: false}}
failure: {{lease_seconds: 1000000, hang_seconds: 1000000}}
"""


class SimulatedConnection:
    """What the coordinator sends is counted and measured, and goes nowhere."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}
        self.nbytes: dict[str, int] = {}
        self.last_heard = float("inf")

    def send(self, message: dict[str, Any]) -> None:
        self.sent[message["type"]] = self.sent.get(message["type"], 0) + 1
        self.nbytes[message["type"]] = len(json.dumps(message))

    def close(self) -> None:
        pass

    abort = close


def description(rank: int, world: int) -> str:
    """As large as that of a rank of a real job; tensors are cut into as many rows as there are ranks."""
    rows = ROWS // world
    begin = rank * ROWS // world
    chunks = [
        Chunk(f"param.layers.{i}.weight", "float32", (ROWS, 64), (begin, 0), (max(rows, 1), 64), 2048 * i, 2048)
        for i in range(CHUNKS)
    ]
    return Description(tuple(chunks), 2048 * CHUNKS).to_json()


BEATING = """
import json, socket, sys
address, token, count, rounds = json.loads(sys.argv[1])
beat = {"type": "heartbeat", "sent": 123.456789, "generation": 1, "started_step": 17, "beats": 123456, "process": "S"}
about = {"type": "join", "token": token, "address": "127.0.0.1", "bytes": ["127.0.0.1", 1], "pool": "", "images": []}
links = [socket.create_connection(address) for _ in range(count)]
lines = [link.makefile("rb") for link in links]
for number, link in enumerate(links):
    link.sendall(json.dumps(about | {"pid": number, "node": f"node-{number // 8}"}).encode() + b"\\n")
for line in lines:
    assert json.loads(line.readline())["type"] == "welcome"
print("joined", flush=True)
sys.stdin.readline()
for _ in range(rounds):
    for link in links:
        link.sendall(json.dumps(beat).encode() + b"\\n")
    for line in lines:
        assert json.loads(line.readline())["type"] == "beat"
print("answered", flush=True)
sys.stdin.readline()
"""
"""Hosts of which only the connections are there."""


async def heartbeat_cpu_seconds(job: Job, count: int = 500, rounds: int = 40) -> float:
    """What the coordinator's process needs to hear a heartbeat over a real connection and to answer it."""
    coordinator = Coordinator(job, "127.0.0.1", "token", lambda event: None, "beats")
    order = json.dumps([await coordinator.start(), "token", count, rounds])
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    hosts = await asyncio.create_subprocess_exec(sys.executable, "-c", BEATING, order, **pipes)
    assert hosts.stdin is not None
    assert hosts.stdout is not None
    assert await hosts.stdout.readline() == b"joined\n"
    before = time.process_time()
    hosts.stdin.write(b"\n")
    assert await hosts.stdout.readline() == b"answered\n"
    spent = time.process_time() - before
    hosts.stdin.write(b"\n")
    await hosts.wait()
    await coordinator.close()
    return spent / (count * rounds)


class Simulation:
    """One coordinator and its hosts."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.coordinator = self.coordinator_of_the_run()
        self.hosts: list[Any] = []

    def coordinator_of_the_run(self) -> Coordinator:
        return Coordinator(self.job, "127.0.0.1", "token", lambda event: None, "run")

    async def run(self, count: int) -> dict[str, float]:
        coordinator = self.coordinator
        await coordinator.start()
        started = time.perf_counter()
        for number in range(count):
            self.join(number)
        joined = time.perf_counter() - started
        started = time.perf_counter()
        while coordinator.generation is None:
            await asyncio.sleep(0.01)
        formed = time.perf_counter() - started
        self.describe(self.descriptions())
        planned = await self.plan()
        self.step(1)
        started = time.perf_counter()
        self.step(2)
        stepped = time.perf_counter() - started
        started = time.perf_counter()
        for host in self.hosts:
            beat = {"type": "heartbeat", "sent": 0.0, "generation": 1, "beats": 1, "started_step": 1, "process": "S"}
            coordinator._handle(host, beat)
        beats = time.perf_counter() - started
        ordered = self.order()
        lost = self.hosts[::100]
        started = time.perf_counter()
        for host in lost:
            coordinator._lose(host)
        while coordinator.generation is None or coordinator.generation.number == 1:
            await asyncio.sleep(0.001)
        decided = time.perf_counter() - started
        generation = coordinator.generation
        told = [cast(SimulatedConnection, member.connection) for member in generation.members]
        texts = self.descriptions()
        started = time.perf_counter()
        with blocked() as rounds:
            self.describe(texts)
            await self.directed()
        restored = time.perf_counter() - started
        await coordinator.close()
        returned = await self.come_back(texts)
        return {
            "hosts": count,
            "join_ms": 1e3 * joined / count,
            "form_s": formed,
            "step_ms": 1e3 * stepped,
            "beats_ms": 1e3 * beats,
            "plan_s": planned,
            "orders_s": ordered,
            "lost": len(lost),
            "decide_s": decided,
            "ranks": generation.layout.world_size,
            "message_kb": max(connection.nbytes["assign"] for connection in told) / 1e3,
            "restore_s": restored,
            "blocked_ms": 1e3 * max(rounds),
            "return_s": returned,
            "directions": sum(connection.sent.get("directions", 0) for connection in told),
            "directions_kb": max(connection.nbytes["directions"] for connection in told) / 1e3,
        }

    def join(self, number: int) -> None:
        node = f"node-{number // PER_NODE}"
        message = {
            "type": "join",
            "pid": number,
            "node": node,
            "address": "127.0.0.1",
            "bytes": ["127.0.0.1", 1],
            "pool": "",
            "images": [],
        }
        connection: Any = SimulatedConnection()
        host = self.coordinator._join(connection, message)
        self.coordinator._handle(host, {"type": "ready"})
        self.hosts.append(host)

    def descriptions(self) -> list[str]:
        """What every rank holds: rows of each tensor, by its place in the layout."""
        generation = self.coordinator.generation
        assert generation is not None
        world = generation.layout.world_size
        return [description(rank, world) for rank in range(world)]

    def describe(self, texts: list[str]) -> None:
        """Every rank tells what it holds."""
        generation = self.coordinator.generation
        assert generation is not None
        for rank, host in enumerate(generation.members):
            about = {"generation": generation.number, "rank": rank}
            self.coordinator._handle(host, {"type": "described", "description": texts[rank], **about})

    async def directed(self) -> None:
        """Every rank has been told where its state is."""
        generation = self.coordinator.generation
        assert generation is not None
        for member in generation.members:
            while "directions" not in cast(SimulatedConnection, member.connection).sent:
                await asyncio.sleep(0)

    async def come_back(self, texts: list[str]) -> float:
        """The coordinator dies and comes back; seconds that it takes to adopt the generation."""
        before = self.coordinator.generation
        assert before is not None
        coordinator = self.coordinator = self.coordinator_of_the_run()
        await coordinator.start()
        for host in before.members:
            self.join(host.number - 1)
        step = before.start_step + 1
        part = {"generation": before.number, "layout": before.layout.as_dict(), "start_step": before.start_step}
        for rank, host in enumerate(self.hosts[-len(before.members) :]):
            partners = [partner.node for partner in before.partners[rank]]
            told = {"message": self.said(rank, step, partners), "held": dict.fromkeys(partners, f"r{rank}")}
            story = {"type": "story", "part": part | {"rank": rank, "running": True}, "steps": [told]}
            story |= {"description": texts[rank], "last_words": [], "trainer_pid": 1, "finished_step": step}
            coordinator._handle(host, story)
        started = time.perf_counter()
        coordinator._coming_back.look()
        adopted = time.perf_counter() - started
        assert coordinator.log.finished_step == step
        await coordinator.close()
        return adopted

    async def plan(self) -> float:
        """Seconds until the uploads of the running generation are planned, once it is read what its ranks hold."""
        run = self.coordinator.run
        while run.inventory.unread:
            await asyncio.sleep(0)
        started = time.perf_counter()
        while not run.checkpointer._plans:
            await asyncio.sleep(0.001)
        return time.perf_counter() - started

    def order(self) -> float:
        """Seconds to order the uploads of the running generation's newest step."""
        run = self.coordinator.run
        generation, checkpointer = run.generation, run.checkpointer
        snapshots = run.inventory.newest_complete(run.members.nodes())
        assert generation is not None
        assert snapshots is not None
        assert checkpointer.claim is not None
        started = time.perf_counter()
        save = Save(snapshots.step, snapshots.generation)
        orders = checkpointer._upload(snapshots, generation.members, checkpointer.claim, save)
        done = time.perf_counter()
        for order in orders:
            order.cancel()
        return done - started

    def step(self, step: int) -> None:
        """Every rank tells of its step and its partners' copies arrive."""
        generation = self.coordinator.generation
        assert generation is not None
        for rank, host in enumerate(generation.members):
            about = {"generation": generation.number, "rank": rank}
            copies = [partner.node for partner in generation.partners[rank]]
            self.coordinator._handle(host, self.said(rank, step, copies) | about)
            for node in copies:
                self.coordinator._handle(
                    host, {"type": "held", "step": step, "node": node, "image": f"r{rank}", **about}
                )

    @staticmethod
    def said(rank: int, step: int, copies: list[str]) -> dict[str, Any]:
        """What the trainer of a rank says of a step."""
        said = {"type": "stepped", "step": step, "image": f"r{rank}", "copies": copies}
        said |= {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "valid_tokens": 8, "seconds": 1.0, "eval_seconds": 0.0}
        said |= {"snapshot_seconds": 0.0, "stall_seconds": 0.0, "data_seconds": 0.0, "cpu_seconds": 0.0}
        return said | {"own_seconds": 0.5, "cpu_wait_seconds": 0.1, "slots": [0, 1], "batch": f"{1:016x}"}


@contextmanager
def blocked() -> Iterator[list[float]]:
    """Seconds of the event loop's thread in each of its rounds meanwhile; what else runs on the machine is left out."""
    rounds: list[float] = []

    async def tick() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            rounds.append(time.thread_time() - before)

    ticker = asyncio.ensure_future(tick())
    try:
        yield rounds
    finally:
        ticker.cancel()


def job_of(folder: Path, count: int, storage: str) -> Job:
    batch = max(64, count)
    return parse_job(JOB.format(data=folder / "data", storage=folder / storage, hosts=count, batch=batch))


def measure(folder: Path, count: int) -> dict[str, float]:
    return asyncio.run(Simulation(job_of(folder, count, str(count))).run(count))


def measure_heartbeats(folder: Path, count: int) -> dict[str, float]:
    beat = asyncio.run(heartbeat_cpu_seconds(job_of(folder, count, f"beats-{count}")))
    rate = count / heartbeat_seconds(FailureConfig(), count)
    return {"beat_us": 1e6 * beat, "beats_per_s": rate, "beats_cores": rate * beat}


def make_data(folder: Path) -> None:
    (folder / "texts").mkdir()
    for number in range(20):
        (folder / "texts" / f"{number}.txt").write_text(" ".join(str(number * 7919 + i * 31) for i in range(12000)))
    prepare(open_corpus(str(folder / "texts")), str(folder / "data"), 300)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hosts", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder))
        for count in options.hosts:
            rows.append(measure(Path(folder), count) | measure_heartbeats(Path(folder), count))
            print("  ".join(f"{key} {value:.4g}" for key, value in rows[-1].items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
