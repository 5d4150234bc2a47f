"""The watch on a machine that a cloud may take: it has Ray drain the node, so that every job leaves it in time.

Beside ``hosts.spot_notice``, which only the hosts of one job ask: Ray places nothing more on a node that is drained.
"""

from __future__ import annotations

import asyncio
import logging
import time

from elastic_train.controller.preempted import GCP_ENDPOINT, Preempted
from elastic_train.controller.ray_nodes import drain_this_machine
from elastic_train.controller.spot_notice import AWS_ENDPOINT, SpotNotice

logger = logging.getLogger(__name__)

_KINDS = {"aws": (SpotNotice, AWS_ENDPOINT), "gcp": (Preempted, GCP_ENDPOINT)}
_RETRY_SECONDS = 1.0


def watch(cloud: str, address: str, endpoint: str | None = None) -> None:
    """Watch for ever.

    Args:
        cloud: ``aws`` or ``gcp``.
        address: of the cluster; ``auto``: that of this machine's node.
        endpoint: of the metadata service; None: that of the cloud.
    """
    kind, usual = _KINDS[cloud]

    def drain(seconds: float, reason: str) -> None:
        logger.warning("%s, in %.0f s", reason, seconds)
        _drain(address, seconds, reason)

    asyncio.run(kind(endpoint or usual).watch(drain))


def _drain(address: str, seconds: float, reason: str) -> None:
    """Until Ray has been told or the time is over: the node may be starting, or the head may be away."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        problem = drain_this_machine(address, left, reason)
        if not problem:
            logger.warning("Ray drains this node")
            return
        logger.warning("%s", problem)
        time.sleep(_RETRY_SECONDS)
