"""What runs, in ``services.json`` of the folder of the services."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_train.cli.guard import UserError
from elastic_train.cli.services.process import ProcessId
from elastic_train.cli.services.servers import KINDS
from elastic_train.storage.formats import KEY, require_known

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Service:
    """One server; ``process`` is None once it was ended. Its ports stay its own, so that addresses stay the same."""

    name: str
    url: str
    ports: tuple[int, ...]
    log: str
    process: ProcessId | None
    since: float

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.alive()

    @property
    def state(self) -> str:
        """``running``, ``stopped`` by the user, or ``dead``: it ended by itself."""
        return "stopped" if self.process is None else "running" if self.running else "dead"


class Record:
    """The services of a folder. Use inside :meth:`locked`, so that two commands do not start a server twice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "services.json"
        self.services: dict[str, Service] = {}

    def load(self) -> Record:
        """Raises UserError when the file is not one of ours, FutureFormat when a later release has written it."""
        if not self._file.exists():
            return self
        try:
            read: dict[str, Any] = json.loads(self._file.read_text())
            require_known(str(self._file), read.get(KEY), FORMAT_VERSION)
            self.services = {entry["name"]: _service(entry) for entry in read["services"] if entry["name"] in KINDS}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self._file} cannot be read ({error}); remove it once its servers are ended") from None
        return self

    def put(self, service: Service) -> None:
        """Writes the file, as a whole or not at all."""
        self.services[service.name] = service
        entries = [asdict(each) for each in self.services.values()]
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps({KEY: FORMAT_VERSION, "services": entries}, indent=1))
        temporary.rename(self._file)

    @contextmanager
    def locked(self) -> Iterator[Record]:
        """Alone with the folder; what others have changed meanwhile is read."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.load()


def _service(entry: dict[str, Any]) -> Service:
    process = entry["process"]
    return Service(
        name=str(entry["name"]),
        url=str(entry["url"]),
        ports=tuple(int(port) for port in entry["ports"]),
        log=str(entry["log"]),
        process=None if process is None else ProcessId(int(process["pid"]), str(process["start"])),
        since=float(entry["since"]),
    )
