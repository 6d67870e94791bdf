"""Runs the NVIDIA source in a process of its own against the compiled stub: LD_LIBRARY_PATH must stand before Python starts.

``python -m tests.integration.agent.nvml`` reads one command a line on stdin (``read`` or ``close``) and answers with
one line of JSON. ``Stub`` is the test's side of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "data" / "nvml" / "nvml_stub.c"
ROOT = Path(__file__).parents[3]


def build(directory: Path) -> Path:
    """Compile the stub; the folder it lies in."""
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / "libnvidia-ml.so.1"
    subprocess.run(
        ["gcc", "-O2", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(library), str(SOURCE)], check=True
    )
    return directory


def line(
    uuid: str, name: str = "NVIDIA_H200", *, total: int = 143771, used: int = 0, reserved: int = 627, util: int = 0,
    temp: int = 40, throttle: int = 0, ecc: int = 0, mig: int = 0, parent: str = "-", err: int = 0, v2err: int = 0,
    procs: str = "-",
) -> str:  # fmt: skip
    """One device of the stub's file; sizes in MiB."""
    return (
        f"{uuid} {name} {total} {used} {reserved} {util} {temp} {throttle} {ecc} {mig} {parent} {err} {v2err} {procs}"
    )


class Stub:
    """A process that reads NVML through the stub; ``put`` changes what the stub shows, at once."""

    def __init__(self, library: Path, directory: Path, *arguments: str) -> None:
        self._file = directory / "devices"
        self.put()
        environment = os.environ | {"LD_LIBRARY_PATH": str(library), "NVML_STUB_FILE": str(self._file)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.agent.nvml", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True,
        )  # fmt: skip

    def put(self, *lines: str) -> None:
        """Replace the file in one step."""
        draft = self._file.with_suffix(".new")
        draft.write_text("\n".join(lines) + "\n")
        draft.replace(self._file)

    def read(self) -> Any:
        """The devices by UUID, or the words of ``SourceDown``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("read\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


def main(arguments: list[str]) -> None:
    """The process side; arguments: the meminfo file, then UUIDs declared unified."""
    from extproc.agent.devices.base import SourceDown
    from extproc.agent.devices.nvidia import Nvml

    source = Nvml(unified=frozenset(arguments[1:]), meminfo_path=Path(arguments[0] if arguments else "/proc/meminfo"))
    for _ in sys.stdin:
        try:
            answer: Any = {reading.uuid: asdict(reading) for reading in source.read()}
        except SourceDown as error:
            answer = {"down": str(error)}
        print(json.dumps(answer), flush=True)
    source.close()


if __name__ == "__main__":
    main(sys.argv[1:])
