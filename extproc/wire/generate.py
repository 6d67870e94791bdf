"""Write ``kvgate_envoy_pb2.py`` and its stub from the .proto beside it: ``python -m extproc.wire.generate``.

A developer's tool (needs grpcio-tools); nothing at run time imports it.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROTO = HERE / "kvgate_envoy.proto"
OUTPUTS = ("kvgate_envoy_pb2.py", "kvgate_envoy_pb2.pyi")
#: Linters leave generated code alone; its message classes inherit from an untyped base (protobuf has no stubs).
HEAD = "# ruff: noqa\n# mypy: ignore-errors\n"


def generate(out: Path) -> None:
    """Generate both files into the folder ``out``; ``RuntimeError`` where protoc refuses the .proto."""
    from grpc_tools import protoc  # type: ignore[import-untyped]

    arguments = [
        "protoc",
        f"--proto_path={HERE}",
        f"--proto_path={resources.files('grpc_tools') / '_proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        str(PROTO),
    ]
    if status := protoc.main(arguments):
        raise RuntimeError(f"protoc ended with status {status}")
    for name in OUTPUTS:
        path = out / name
        path.write_text(HEAD + path.read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    generate(HERE)
    sys.stdout.write("".join(f"wrote {HERE / name}\n" for name in OUTPUTS))
