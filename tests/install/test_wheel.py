"""The wheel, built from the tree and opened: everything the package needs at run time, nothing else."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.install.support import ROOT, build_wheel


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in a freshly built wheel."""
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel"))) as wheel:
        return wheel.namelist()


def test_every_file_of_the_package_ships(names: list[str]) -> None:
    """Modules and data files (Lua, JSON, YAML, stubs, py.typed) are all in the wheel."""
    package = ROOT / "extproc"
    there = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(there) > 20
    assert {str(Path("extproc") / path.relative_to(package)) for path in there} - set(names) == set()


def test_nothing_else_ships(names: list[str]) -> None:
    """Tests, Envoy files and docs stay out; above all no `envoy/`, which is another package's folder."""
    assert {name.split("/")[0] for name in names} == {"extproc", "kvgate-0.1.0.dist-info"}


def test_licence_and_notice_ship(names: list[str]) -> None:
    """The licence text and the notices of bundled data are part of the distribution."""
    assert {"kvgate-0.1.0.dist-info/licenses/LICENSE", "kvgate-0.1.0.dist-info/licenses/NOTICE"} <= set(names)
