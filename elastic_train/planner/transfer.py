"""How long an exchange takes on links of given speeds: the bytes of a ring, and the hops that they wait for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from elastic_train.config.layout import Layout
from elastic_train.planner.exchange import Axis, Exchange, group_sizes, sent_share
from elastic_train.planner.hardware import Accelerator


@dataclass(frozen=True, slots=True)
class Spread:
    """How a group lies on the nodes: ``here`` of its ``ranks`` on each of ``nodes``."""

    ranks: int
    here: int
    nodes: int


@lru_cache(maxsize=4096)
def spreads(layout: Layout, per_node: int) -> dict[Axis, Spread]:
    """Of the groups of every axis, where ranks follow each other node by node."""
    found: dict[Axis, Spread] = {}
    for axis, ranks in group_sizes(layout).items():
        apart = {"cp": layout.tp, "shard": layout.tp, "batch": layout.tp}.get(axis, 1)
        apart = {
            "replicate": layout.tp * layout.shards,
            "pp": layout.world_size // layout.pp,
            "ends": layout.world_size // layout.pp,
        }.get(axis, apart)
        here = min(ranks, max(1, per_node // apart))
        found[axis] = Spread(ranks, here, math.ceil(ranks / here))
    return found


def transfer_seconds(each: Exchange, layout: Layout, accelerator: Accelerator) -> float:
    """Of all exchanges of this kind in a step, one after the other.

    A group with ``k`` ranks on each of ``n`` nodes sends in a ring: what goes around inside a node at the speed of its
    links, what leaves it over the network cards of those ``k`` ranks together, both at once (as NCCL's rings do, one
    per card). All-to-all sends straight to each rank. Latency: a hop per rank, or NCCL's trees for all-reduces.
    """
    share = accelerator.transfer_efficiency * accelerator.collective_shares.get(each.collective, 1.0)
    if each.collective == "copy":
        bandwidth = accelerator.host_link_bytes_per_second * share
        return each.count * (each.payload_bytes / bandwidth + accelerator.link_latency_seconds)
    spread, payload = spreads(layout, accelerator.per_node)[each.axis], each.payload_bytes
    if each.collective == "send":
        return each.count * _send_seconds(payload, _sent_outside(each.axis, spread), share, accelerator)
    ranks, here, nodes = spread.ranks, spread.here, spread.nodes
    link = accelerator.link_between(here) * share
    network = accelerator.network_bytes_per_second * share
    if each.collective == "all_to_all":
        seconds = payload / ranks * max((here - 1) / link, (ranks - here) / network)
    else:
        outside = payload * sent_share(each.collective, nodes) / (here * network)
        seconds = max(payload * sent_share(each.collective, ranks) / link, outside)
    seconds += accelerator.exchange_seconds
    return each.count * (seconds + _hops(each.collective, here, nodes, accelerator))


def _send_seconds(payload: float, outside: float, share: float, accelerator: Accelerator) -> float:
    """Of one send; ``outside``: how many of all leave the node."""
    link = payload / (accelerator.link_between(2) * share) + accelerator.link_latency_seconds
    network = payload / (accelerator.network_bytes_per_second * share) + accelerator.network_latency_seconds
    return (1 - outside) * link + outside * network + accelerator.exchange_seconds


def _sent_outside(axis: Axis, spread: Spread) -> float:
    """Of the sends of a pipeline's slowest rank: it is the last on its node, and its other neighbour is on the same."""
    if spread.nodes == 1:
        return 0.0
    return 1.0 if spread.here == 1 or axis == "ends" else 0.5


def _hops(collective: str, here: int, nodes: int, accelerator: Accelerator) -> float:
    """Seconds of latency."""
    link, network = accelerator.link_latency_seconds, accelerator.network_latency_seconds
    if collective == "all_to_all":
        return link if nodes == 1 else network
    ring = (here - 1) * link + (nodes - 1) * network
    if collective != "all_reduce":
        return ring
    return 2 * min(ring, (here - 1) * link + math.log2(nodes) * network)
