"""The device sources of a node, one per vendor, and the host's own memory."""

from __future__ import annotations

import shutil
import sys

from extproc.agent.devices.base import DeviceSource
from extproc.agent.devices.command import AmdSmi, AppleMetal, IntelXpu
from extproc.agent.devices.host import Host
from extproc.agent.devices.nvidia import Nvml
from extproc.agent.devices.sysfs import AMD, ROOT, AmdSysfs, cards


def sources(node: str, *, unified: frozenset[str] = frozenset()) -> list[DeviceSource]:
    """The sources worth asking here: NVML always (it may come later), the others where their means are there."""
    found: list[DeviceSource] = [Nvml(unified=unified)]
    if cards(ROOT, AMD):
        found.append(AmdSysfs())
    elif shutil.which("amd-smi"):
        found.append(AmdSmi())
    if shutil.which("xpu-smi"):
        found.append(IntelXpu())
    if sys.platform == "darwin":
        found.append(AppleMetal())
    else:
        found.append(Host(node))
    return found
