"""Fresh installs, as an operator makes them: clean virtual environment, locked `local` stack, our wheel, all imports."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install.support import ROOT, build_wheel

pytestmark = [pytest.mark.install, pytest.mark.timeout(900)]

LOCK = str(ROOT / "requirements" / "local.txt")
UV = str(Path(sys.executable).with_name("uv"))


def run(*command: str, cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def interpreters() -> list[str]:
    """This interpreter, and every other supported one that is on the machine and works."""
    found = {f"python3.{sys.version_info.minor}": sys.executable}
    for name in ("python3.11", "python3.12", "python3.13"):
        path = shutil.which(name)
        if path and name not in found:
            works = subprocess.run([path, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0
            found |= {name: path} if works else {}
    return sorted(found.values())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Our wheel, built once."""
    return str(build_wheel(tmp_path_factory.mktemp("wheel")))


def with_pip(venv: Path, python: str, wheel: str) -> None:
    """Install with the pip that comes with the interpreter."""
    run(python, "-m", "venv", str(venv), cwd=venv.parent)
    pip = (str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--require-hashes", "-r", LOCK, cwd=venv.parent)
    run(*pip, "--no-deps", wheel, cwd=venv.parent)


def with_uv(venv: Path, python: str, wheel: str) -> None:
    """Install with uv."""
    run(UV, "venv", "--quiet", "--python", python, str(venv), cwd=venv.parent)
    pip = (UV, "pip", "install", "--quiet", "--python", str(venv / "bin" / "python"))
    run(*pip, "--require-hashes", "-r", LOCK, cwd=venv.parent)
    run(*pip, "--no-deps", wheel, cwd=venv.parent)


@pytest.mark.parametrize("python", interpreters())
@pytest.mark.parametrize("install", [with_pip, with_uv])
def test_fresh_install_imports_everything(install, python: str, wheel: str, tmp_path: Path) -> None:
    """Every module of extproc, the OTLP exporter and Envoy's wheel import together, and the command answers."""
    venv = tmp_path / "venv"
    install(venv, python, wheel)
    shutil.copy(Path(__file__).with_name("probe.py"), tmp_path)
    print(run(str(venv / "bin" / "python"), "-I", "probe.py", cwd=tmp_path))
    assert "usage: kvgate" in run(str(venv / "bin" / "kvgate"), "--help", cwd=tmp_path)
    if install is with_pip:
        run(str(venv / "bin" / "python"), "-m", "pip", "check", cwd=tmp_path)
    _refuses_xds_protos(venv, tmp_path)


def _refuses_xds_protos(venv: Path, folder: Path) -> None:
    (site,) = venv.glob("lib/python3.*/site-packages")
    meta = site / "xds_protos-0.0.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: xds-protos\nVersion: 0.0.0\n")
    done = subprocess.run([venv / "bin" / "python", "-I", "probe.py"], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, "xds-protos is installed" in done.stdout) == (1, True)
