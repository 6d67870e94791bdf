"""The lock files: complete, hashed, consistent with each other and with pyproject.toml, and tied to no index."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.install.support import LOCKS, PIN, ROOT, pins

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}(?: \\)?$")


def wanted(lock: str) -> list[Requirement]:
    """The direct requirements that ``requirements/lock.txt`` must fulfil."""
    extras = PROJECT["project"]["optional-dependencies"]
    groups = PROJECT["dependency-groups"]
    texts = [*PROJECT["project"]["dependencies"], *groups["build"]]
    texts += extras["local"] if lock not in ("base", "fuzz") else []
    texts += extras["demo"] if lock in ("demo", "dev") else []
    texts += [entry for entry in groups.get(lock, []) if isinstance(entry, str)]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_is_a_pin_or_a_hash(lock: str) -> None:
    """A lock names versions and hashes only: no index address, no path, no option, no comment."""
    lines = (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="ascii").splitlines()
    assert [line for line in lines if not PIN.match(line) and not HASH.match(line)] == []


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_has_a_hash(lock: str) -> None:
    """pip refuses a requirement without a hash; none is without."""
    lines = (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="ascii").splitlines()
    bare = [a for a, b in zip(lines, [*lines[1:], ""], strict=True) if PIN.match(a) and not HASH.match(b)]
    assert len(pins(lock)) > 30
    assert bare == []


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_fulfils_pyproject(lock: str) -> None:
    """Each direct dependency is locked at a version that pyproject.toml allows (else: `make lock`)."""
    locked = {}
    for name, version, _ in pins(lock):
        locked.setdefault(canonicalize_name(name), []).append(version)
    unmet = [
        str(requirement)
        for requirement in wanted(lock)
        if not locked.get(name := canonicalize_name(requirement.name))
        or not all(requirement.specifier.contains(version) for version in locked[name])
    ]
    assert unmet == []


@pytest.mark.parametrize("lock", [lock for lock in LOCKS if lock != "dev"])
def test_locks_agree(lock: str) -> None:
    """What is tested (dev) and fuzzed is what is shipped (base, local, demo): the same versions throughout."""
    tested = {(name, version) for name, version, _ in pins("dev")} | {("atheris", "3.0.0")}
    assert {(name, version) for name, version, _ in pins(lock)} - tested == set()


@pytest.mark.parametrize("lock", LOCKS)
def test_xds_protos_stays_out(lock: str) -> None:
    """xds-protos overwrites opentelemetry/proto with an old copy, so that the OTLP exporter cannot be imported."""
    assert "xds-protos" not in {canonicalize_name(name) for name, _, _ in pins(lock)}


def test_no_registry_is_named_in_project_files() -> None:
    """Where packages come from is the machine's business: no project file names an index."""
    files = [ROOT / name for name in ("pyproject.toml", "Makefile", "Dockerfile", ".pre-commit-config.yaml", ".ci/run")]
    files += (ROOT / "requirements").iterdir()
    index = re.compile(r"pypi\.|pythonhosted|index-url|find-links|/simple\b", re.IGNORECASE)
    allowed = re.compile(r"--no-emit-index-url|--no-index")
    found = [
        f"{path.name}: {line}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if index.search(allowed.sub("", line))
    ]
    assert found == []
