"""The version of this installation."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("kvgate")
    except PackageNotFoundError:
        # Run from a checkout that is not installed.
        return "0+uninstalled"


VERSION = _installed()
