"""The network interface behind an address."""

from __future__ import annotations

import ipaddress

import psutil


def interface_of(address: str) -> str | None:
    """Name of the network interface that has ``address`` (the whole of 127.0.0.0/8 is ``lo``'s)."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return "lo" if ipaddress.ip_address(address).is_loopback else None
