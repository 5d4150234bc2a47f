"""What a coordinator that has come back asks the hosts when it must form a generation from what is in memory."""

from __future__ import annotations

from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.inventory import Inventory
from elastic_train.controller.wire import Message

SURVEY_SECONDS = 10.0
"""Longest wait for the hosts' answers about their images."""


class Survey:
    """What the images in memory are, once nobody writes them any more.

    A node's hosts share its images, so one of them tells of all, when the trainers of all have ended.

    Args:
        now: seconds of a monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._deadline = now + SURVEY_SECONDS
        self._hosts: dict[str, dict[int, HostRecord]] = {}
        """by node and number: those that were asked and are there"""
        self._ending: dict[str, set[int]] = {}
        """node -> numbers of the hosts whose trainers may still write"""
        self._looking: dict[str, int] = {}
        """node -> number of the host that has been asked for the images there"""
        self._found: dict[str, Message] = {}
        """by node"""

    def ask(self, host: HostRecord) -> None:
        """Let it end its trainer."""
        self._hosts.setdefault(host.node, {})[host.number] = host
        self._ending.setdefault(host.node, set()).add(host.number)
        host.connection.send({"type": "survey"})

    def tell(self, host: HostRecord, message: Message) -> None:
        """Its answer: its trainer has ended (``surveyed``), or what its node has (``pool``)."""
        if message["type"] == "surveyed":
            self._ending.get(host.node, set()).discard(host.number)
        elif self._looking.get(host.node) == host.number:
            del self._looking[host.node]
            self._found[host.node] = message
            return
        self._look(host.node)

    def lose(self, host: HostRecord) -> None:
        self._hosts.get(host.node, {}).pop(host.number, None)
        self._ending.get(host.node, set()).discard(host.number)
        if self._looking.get(host.node) == host.number:
            del self._looking[host.node]
        if host.node not in self._found:
            self._look(host.node)

    def _look(self, node: str) -> None:
        """Ask for the images on ``node`` as soon as nobody writes them."""
        if self._ending.get(node) or node in self._looking:
            return
        if (host := next(iter(self._hosts.get(node, {}).values()), None)) is not None:
            self._looking[node] = host.number
            host.connection.send({"type": "tell_pool"})

    def over(self, now: float) -> bool:
        return not (any(self._ending.values()) or self._looking) or now >= self._deadline

    def fill(self, inventory: Inventory) -> None:
        """Let ``inventory`` know all of it; images of generations it does not know are of no use."""
        for node, message in self._found.items():
            known = set()
            for image in message["images"]:
                if inventory.add(image["generation"], image["rank"], image["step"], node, image["image"]) is not None:
                    known.add((image["generation"], image["rank"]))
            for told in message["descriptions"]:
                if (told["generation"], told["rank"]) in known:
                    inventory.describe(told["generation"], told["rank"], told["description"])
