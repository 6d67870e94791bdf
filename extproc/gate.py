"""Whether a process takes work, and how it leaves without a request lost; who asks for it is not known here."""

from __future__ import annotations

import asyncio


class Gate:
    """Whether this process takes new work (``open``) and whether it wants any (``wanted``, what health says).

    It leaves in two steps: work goes on coming until Envoy has seen that it is not wanted any more.
    """

    __slots__ = ("_changed", "open", "wanted")

    def __init__(self) -> None:
        self.open = False
        self.wanted = False
        self._changed = asyncio.Event()

    def set(self, *, open_: bool, wanted: bool) -> None:
        """Take the next step, and tell whoever watches health."""
        self.open = open_
        self.wanted = wanted
        self._changed.set()
        self._changed = asyncio.Event()

    def changed(self) -> asyncio.Event:
        """Set at the next change after now."""
        return self._changed
