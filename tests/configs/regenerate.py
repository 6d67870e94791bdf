"""Write the ready-made Envoy configurations anew: ``python -m tests.configs.regenerate`` (``make envoy``)."""

from __future__ import annotations

from pathlib import Path

from extproc.config import load
from extproc.gateway.build import as_yaml, build

ROOT = Path(__file__).parents[2]


def sources() -> dict[Path, Path]:
    """Every configuration that has a ready-made Envoy file -> that file."""
    examples = {path: ROOT / "envoy" / path.name for path in sorted((ROOT / "deploy" / "examples").glob("*.yaml"))}
    return {**examples, ROOT / "deploy/compose/kvgate.yaml": ROOT / "deploy/compose/envoy.yaml"}


def generate(source: Path) -> str:
    """What ``kvgate envoy`` prints for ``source``."""
    return as_yaml(build(load(source)))


if __name__ == "__main__":
    for source, made in sources().items():
        made.write_text(generate(source), encoding="utf-8")
        print(f"wrote {made.relative_to(ROOT)}")
