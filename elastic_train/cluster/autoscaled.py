"""A Ray cluster on this machine that grows and shrinks: a head with Ray's own autoscaler, and machines that it orders.

The autoscaler is version 2, as that of ``ray up``; the machines are those of ``local_machines``.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic_train.cluster.local_machines import HEAD_ID, LocalMachines
from elastic_train.cluster.networks import Bridge, Network
from elastic_train.controller.local_cluster import LocalCluster

_UPDATE_SECONDS = "1"
"""Between two looks of the autoscaler (Ray's default is 5)."""


class AutoscaledCluster(LocalCluster):
    """Its worker nodes come and go with what is asked of Ray.

    Args:
        config: a cluster file whose provider is ``LocalMachines``.
        bridge: for namespaces of the machines (needs root); None: they are all on loopback.
    """

    def __init__(self, config: dict[str, Any], bridge: Bridge | None, *, include_dashboard: bool = False) -> None:
        self._config, self._bridge = config, bridge
        head = {} if bridge is None else {"head": bridge.address}
        super().__init__(include_dashboard=include_dashboard, **head)

    @property
    def head_lives(self) -> bool:
        return self.nodes[0].process.poll() is None

    def lines(self) -> list[str]:
        """What to do with it, for a shell. The token is in a file that only its owner may read."""
        return [
            *([f". {shlex.quote(str(self._token_file))}"] if self._token_file.exists() else []),
            f"export RAY_ADDRESS={self.address}",
            f"export RAY_API_SERVER_ADDRESS=http://{self._head}:{self.dashboard_port}",
            "# in another terminal, then: elastic-train submit CONFIG, or ray status",
        ]

    @property
    def _token_file(self) -> Path:
        return self.folder / "token"

    def _keep_token(self) -> None:
        if token := os.environ.get("RAY_AUTH_TOKEN"):
            self._token_file.touch(mode=0o600)
            self._token_file.write_text(f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN={shlex.quote(token)}\n")

    def _head_options(self) -> list[str]:
        self._keep_token()
        path = self.folder / "cluster.yaml"
        path.write_text(json.dumps(self._filled_in()))  # JSON is YAML
        return [*super()._head_options(), f"--autoscaling-config={path}"]

    def _head_environment(self) -> Mapping[str, str]:
        return {
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
            "RAY_NODE_TYPE_NAME": self._config["head_node_type"],
            "AUTOSCALER_UPDATE_INTERVAL_S": _UPDATE_SECONDS,
        }

    def _filled_in(self) -> dict[str, Any]:
        """What the autoscaler reads: the provider knows where it is."""
        provider = {
            **self._config["provider"],
            "module": f"{LocalMachines.__module__}.{LocalMachines.__qualname__}",
            "head": self.address,
            "head_node_type": self._config["head_node_type"],
            "folder": str(self.folder),
            "bridge": asdict(self._bridge) if self._bridge else None,
        }
        return {**self._config, "provider": provider}


@contextmanager
def autoscaled_cluster(
    config: dict[str, Any], *, namespaces: bool, include_dashboard: bool = False
) -> Iterator[AutoscaledCluster]:
    """The cluster, running. In the end none of its processes, namespaces and files is left.

    Args:
        namespaces: whether each machine has a network of its own (needs root).

    Raises:
        ClusterError: the head did not come up.
        NetworkError: there can be no namespaces.
    """
    with ExitStack() as stack:
        bridge = stack.enter_context(Network()).bridge if namespaces else None
        yield stack.enter_context(AutoscaledCluster(config, bridge, include_dashboard=include_dashboard))
