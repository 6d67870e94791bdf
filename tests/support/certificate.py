"""A self-made certificate for one test, by the openssl program."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for the DNS name ``name`` that is its own CA; (chain, key) as PEM files in ``folder``."""
    chain, key = folder / f"{name}.pem", folder / f"{name}.key"
    arguments = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    arguments += ["-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    subprocess.run([*arguments, "-keyout", str(key), "-out", str(chain)], check=True, capture_output=True, timeout=120)
    return chain, key
