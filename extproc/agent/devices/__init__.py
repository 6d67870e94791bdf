"""The device sources of a node, one per vendor, and the host's own memory."""

from __future__ import annotations

from extproc.agent.devices.base import DeviceSource
from extproc.agent.devices.host import Host
from extproc.agent.devices.nvidia import Nvml


def sources(node: str, *, unified: frozenset[str] = frozenset()) -> list[DeviceSource]:
    """Every source; those without hardware here stay silent."""
    return [Nvml(unified=unified), Host(node)]
