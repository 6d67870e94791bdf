"""What a command does with standard streams that are closed, full or no longer read, and with what has no end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

CONFIG = "lanes: {a: {fallback: far}}\ntargets: {far: {engine: openai, url: 'https://api.example.com'}}\n"
#: Long: a machine that is busy with other tests imports slowly.
TIMEOUT_S = 120.0


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``kvgate``, written ``$K`` in the command, as a shell would."""
    kvgate = f"'{sys.executable}' -m extproc.cli"
    environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    (folder / "k.yaml").write_text(CONFIG)
    return subprocess.run(
        ["bash", "-c", command.replace("$K", kvgate)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("command", ["estimate --list", "check k.yaml", "check k.yaml --json", "plan --device 24GiB"])
def test_a_full_disk_is_one_line(tmp_path: Path, command: str) -> None:
    """Status 1, and the mend; whatever was buffered is not complained of again while Python ends."""
    done = shell(f"$K {command} >/dev/full", tmp_path)

    assert done.returncode == 1
    name = command.split()[0]
    assert done.stderr.splitlines()[-1] == (
        f"kvgate {name}: cannot write (No space left on device); make room or write elsewhere"
    )
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr


@pytest.mark.parametrize("command", ["estimate --list", "check k.yaml", "envoy k.yaml"])
def test_a_reader_that_left_is_no_trouble(tmp_path: Path, command: str) -> None:
    """``head`` has what it wants, before or after the first byte."""
    done = shell(f"$K {command} | true; exit ${{PIPESTATUS[0]}}", tmp_path)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["check k.yaml", "envoy k.yaml"])
def test_closed_streams_do_not_matter(tmp_path: Path, command: str, closed: str) -> None:
    """As some service managers and cron jobs leave them."""
    done = shell(f"$K {command} {closed}", tmp_path)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_standard_input_is_an_empty_body(tmp_path: Path) -> None:
    """Not a traceback."""
    done = shell("$K count - --path /v1/chat/completions <&-", tmp_path)

    assert (done.returncode, done.stderr) == (1, "-: 400 invalid_json: The request body is empty.\n")


@pytest.mark.parametrize("body", ["/dev/zero", "- </dev/zero"])
def test_a_body_without_an_end_is_read_to_its_limit(tmp_path: Path, body: str) -> None:
    """It is refused like any that is too long."""
    done = shell(f"$K count --path /v1/chat/completions {body}", tmp_path)

    assert done.returncode == 1
    assert " 413 " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("up --engine http://u:geheim@h:1", "kvgate up: --engine has a form that cannot be used here; "),
        ("up --engine ftp://h", "kvgate up: --engine has a form that cannot be used here; "),
        ("up --engine http://h:1 --engine http://h:1/", "kvgate up: --engine http://h:1 is given twice; "),
        ("estimate Qwen2.5-7B --tokens -5", "--tokens is -5; give at least 1"),
        ("plan --device x", "size 'x' is not understood; "),
        ("plan --device 24GiBx0", "device '24GiBx0' names 0 devices; "),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(tmp_path: Path, arguments: str, line: str) -> None:
    """As argparse's own; what may hold a password is not repeated."""
    done = shell(f"$K {arguments}", tmp_path)

    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert len(done.stderr.splitlines()) == 1
    assert "geheim" not in done.stderr + done.stdout
