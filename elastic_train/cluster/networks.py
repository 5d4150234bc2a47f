"""Machines of a made-up network: network namespaces on one bridge, whose links can be taken down and up. Needs root."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from dataclasses import dataclass

import psutil

_PREFIX = "et"
_COMMAND_SECONDS = 60.0
_numbers = itertools.count()


class NetworkError(RuntimeError):
    """A command of ``ip`` failed, and the message has what it said; or there is no such program."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One namespace. ``command`` goes before that of a process that is to be in it."""

    name: str
    """of the namespace, and of the bridge's end of its link"""
    address: str

    @property
    def command(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """From now on nothing comes or goes; neither side is told."""
        _ip("link", "set", self.name, "down")

    def part_from(self, other: Machine) -> None:
        """The two reach everybody but each other, and are told so when they try."""
        for one, address in ((self, other.address), (other, self.address)):
            _ip("-n", one.name, "route", "add", "unreachable", address)

    def reconnect(self) -> None:
        _ip("link", "set", self.name, "up")

    def remove(self) -> None:
        """Its processes must have ended. What is gone already is no error."""
        _remove("netns", self.name)
        _remove("link", self.name)


@dataclass(frozen=True, slots=True)
class Bridge:
    """A bridge that exists, whoever made it, and the /24 of its machines."""

    name: str
    subnet: str
    """the first three numbers"""

    @property
    def address(self) -> str:
        """That of what runs in no namespace of its own."""
        return f"{self.subnet}.1"

    def add(self, number: int) -> Machine:
        """The machine with that last number (2 to 254), connected.

        Raises:
            NetworkError: there is one with this number already, or this is not root.
        """
        machine = Machine(f"{self.name}.{number}", f"{self.subnet}.{number}")
        try:
            _ip("netns", "add", machine.name)
            _ip("link", "add", machine.name, "type", "veth", "peer", "name", "eth0", "netns", machine.name)
            _ip("link", "set", machine.name, "master", self.name, "up")
            _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            _ip("-n", machine.name, "link", "set", "eth0", "up")
            _ip("-n", machine.name, "link", "set", "lo", "up")
        except BaseException:
            machine.remove()
            raise
        return machine


class Network:
    """Context manager: a bridge of its own, and in the end no namespace or link of it, whoever added them.

    Processes in the namespaces must have ended before the end. Names have our pid in them; what a killed process has
    left behind is removed by the next one.
    """

    def __init__(self) -> None:
        self._name = f"{_PREFIX}{os.getpid()}.{next(_numbers)}"
        self._count = 1

    def __enter__(self) -> Network:
        _remove_abandoned()
        self.bridge = Bridge(self._name, _free_subnet())
        try:
            _ip("link", "add", self._name, "type", "bridge")
            _ip("addr", "add", f"{self.address}/24", "dev", self._name)
            _ip("link", "set", self._name, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for kind, name in _names():
            if name == self._name or name.startswith(f"{self._name}."):
                _remove(kind, name)

    @property
    def address(self) -> str:
        return self.bridge.address

    def add(self) -> Machine:
        """One more machine, connected."""
        self._count += 1
        return self.bridge.add(self._count)


def _ip(*arguments: str) -> str:
    said = f"ip {' '.join(arguments)}"
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except OSError as error:
        what = f"{said} cannot be started ({error.strerror})"
        raise NetworkError(f"{what}; install iproute2, or give --no-namespaces") from None
    except subprocess.TimeoutExpired:
        what = f"{said} did not end within {_COMMAND_SECONDS:g} seconds"
        raise NetworkError(f"{what}; try again, or give --no-namespaces") from None
    if done.returncode:
        raise NetworkError(f"{said}: {done.stderr.strip()}")
    return done.stdout


def _remove(kind: str, name: str) -> None:
    with contextlib.suppress(NetworkError):  # a link goes with the namespace of its other end
        _ip(kind, "del", name)


def _names() -> list[tuple[str, str]]:
    """``netns`` or ``link`` and the name, of all there are, namespaces first."""
    namespaces = [line.split()[0] for line in _ip("netns", "list").splitlines()]
    links = [line.split()[0].partition("@")[0] for line in _ip("-brief", "link").splitlines()]
    return [*(("netns", name) for name in namespaces), *(("link", name) for name in links)]


def _free_subnet() -> str:
    """The first three numbers of an unused /24."""
    used = _ip("-4", "-brief", "addr")
    candidates = (f"10.213.{number % 256}" for number in itertools.count(os.getpid() % 256))
    return next(subnet for subnet in candidates if f" {subnet}." not in used)


def _remove_abandoned() -> None:
    """Namespaces and links of processes that were killed before they could."""
    for kind, name in _names():
        owner = name.removeprefix(_PREFIX).partition(".")[0]
        if name.startswith(_PREFIX) and "." in name and owner.isdigit() and not psutil.pid_exists(int(owner)):
            _remove(kind, name)
