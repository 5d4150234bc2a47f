"""Machines of a made-up network: network namespaces on one bridge, whose links can be taken down and up. Needs root."""

from __future__ import annotations

import itertools
import os
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass

import psutil

_PREFIX = "et"
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Machine:
    """One namespace. ``command`` goes before that of a process that is to be in it."""

    name: str
    address: str
    link: str
    """the bridge's end of its link"""

    @property
    def command(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """From now on nothing comes or goes; neither side is told."""
        _ip("link", "set", self.link, "down")

    def part_from(self, other: Machine) -> None:
        """The two reach everybody but each other, and are told so when they try."""
        for one, address in ((self, other.address), (other, self.address)):
            _ip("-n", one.name, "route", "add", "unreachable", address)

    def reconnect(self) -> None:
        _ip("link", "set", self.link, "up")


class Network:
    """Context manager. ``address`` is that of the bridge, for what runs in no namespace of its own.

    Processes in the namespaces must have ended before the end. Names have our pid in them; what a killed process has
    left behind is removed by the next one.
    """

    def __init__(self) -> None:
        self._name = f"{_PREFIX}{os.getpid()}.{next(_numbers)}"
        self._count = 1
        self._cleanup = ExitStack()

    def __enter__(self) -> Network:
        _remove_abandoned()
        self._subnet = _free_subnet()
        try:
            self._make("link", "add", self._name, "type", "bridge", undo=("link", "del", self._name))
            _ip("addr", "add", f"{self.address}/24", "dev", self._name)
            _ip("link", "set", self._name, "up")
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    @property
    def address(self) -> str:
        return f"{self._subnet}.1"

    def add(self) -> Machine:
        """One more machine, connected."""
        self._count += 1
        name = f"{self._name}.{self._count}"
        machine = Machine(name, f"{self._subnet}.{self._count}", name)
        inside = ("-n", name)
        self._make("netns", "add", name, undo=("netns", "del", name))
        peer = ("peer", "name", "eth0", "netns", name)
        self._make("link", "add", machine.link, "type", "veth", *peer, undo=("link", "del", machine.link))
        _ip("link", "set", machine.link, "master", self._name, "up")
        _ip(*inside, "addr", "add", f"{machine.address}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip(*inside, "link", "set", "lo", "up")
        return machine

    def _make(self, *arguments: str, undo: tuple[str, ...]) -> None:
        _ip(*arguments)
        self._cleanup.callback(_ip, *undo)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"
    return done.stdout


def _free_subnet() -> str:
    """The first three numbers of an unused /24."""
    used = _ip("-4", "-brief", "addr")
    candidates = (f"10.213.{number % 256}" for number in itertools.count(os.getpid() % 256))
    return next(subnet for subnet in candidates if f" {subnet}." not in used)


def _remove_abandoned() -> None:
    """Namespaces and links of processes that were killed before they could."""
    namespaces = [line.split()[0] for line in _ip("netns", "list").splitlines()]
    links = [line.split()[0].partition("@")[0] for line in _ip("-brief", "link").splitlines()]
    for kind, names in (("netns", namespaces), ("link", links)):
        for name in names:
            owner = name.removeprefix(_PREFIX).partition(".")[0]
            if name.startswith(_PREFIX) and "." in name and owner.isdigit() and not psutil.pid_exists(int(owner)):
                subprocess.run(["ip", kind, "del", name], capture_output=True, timeout=60)
