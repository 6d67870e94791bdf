"""``kvgate count``: one body to counts, errors as values, wrong usage as one line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from extproc.cli import main
from tests.payloads.runner import SHIPPED
from tests.payloads.tokenizers import CHATML, tokenizer_dir

CHAT = "/v1/chat/completions"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    status = main(["count", *arguments])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out.startswith("{") else out, err


def test_the_json_has_the_schemas_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """Every key of the contract, the bound without a configuration."""
    status, found, _ = run(capsys, str(SHIPPED / "14-chat-n3.json"), "--path", CHAT + "?beta=true", "--json")
    assert status == 0
    assert list(found) == [
        "path", "dialect", "model", "stream", "prompts", "sequences", "input_tokens", "max_output_tokens", "kv_tokens_max",
        "count_source", "images", "unknown_parts", "reserve", "warnings",
    ]  # fmt: skip
    assert (found["path"], found["dialect"], found["sequences"], found["count_source"]) == (
        CHAT,
        "openai.chat",
        3,
        "bound",
    )
    assert found["kv_tokens_max"] == found["input_tokens"] + 3 * 400


def test_a_configuration_makes_it_exact(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The tokenizer and template of the request's model count."""
    (tmp_path / "t.jinja").write_text(CHATML)
    (tmp_path / "k.yaml").write_text(
        f"""
models: {{m: {{tokenizer: {tokenizer_dir("qwen-2.5")}/tokenizer.json, chatTemplate: {tmp_path}/t.jinja}}}}
targets: {{t: {{model: m, engine: vllm, replicas: [{{name: r, url: "http://127.0.0.1:1", kvTokens: 8192}}]}}}}
lanes: {{l: {{maxInputTokens: 6000, maxOutputTokens: 1200, concurrency: 2}}}}
aliases: {{qwen2.5-7b-instruct: {{lane: l, targets: [t]}}}}
noAgent: ledgerOnly
"""
    )
    status, found, err = run(
        capsys, str(SHIPPED / "14-chat-n3.json"), "--path", CHAT, "-c", str(tmp_path / "k.yaml"), "--json"
    )
    assert (status, err) == (0, "")
    assert (found["input_tokens"], found["count_source"], found["kv_tokens_max"]) == (22, "exact", 1222)


def test_an_invalid_body_is_an_error_object(capsys: pytest.CaptureFixture[str]) -> None:
    """On stdout with status 1, as the contract says."""
    status, found, _ = run(capsys, str(SHIPPED / "12-chat-max-string.json"), "--path", CHAT, "--json")
    assert status == 1
    assert (found["error"]["status"], found["error"]["code"], found["error"]["param"]) == (
        400,
        "invalid_type",
        "max_tokens",
    )


def test_headers_matter(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A body from stdin with its encoding declared."""
    stdin = io.TextIOWrapper(io.BytesIO((SHIPPED / "25-chat-gzip.bin").read_bytes()))
    monkeypatch.setattr("sys.stdin", stdin)
    status, found, _ = run(capsys, "-", "--path", CHAT, "--header", "Content-Encoding: gzip", "--json")
    assert (status, found["max_output_tokens"]) == (0, 512)


def test_an_unknown_path_takes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """No dialect, no reservation, no error."""
    status, found, err = run(
        capsys, str(SHIPPED / "73-audio-multipart.bin"), "--path", "/v1/audio/transcriptions", "--json"
    )
    assert (status, found["dialect"], found["reserve"], found["count_source"]) == (0, None, False, None)
    assert err.startswith("kvgate count: --path /v1/audio/transcriptions: is no path that kvgate counts; ")


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A missing file, a header without a colon, a broken body: named, with what would mend it."""
    for arguments, status in (
        ((str(tmp_path / "no"), "--path", CHAT), 1),
        ((str(SHIPPED / "14-chat-n3.json"), "--path", CHAT, "--header", "nonsense"), 2),
        ((str(SHIPPED / "44-chat-truncated.bin"), "--path", CHAT), 1),
    ):
        got, _, err = run(capsys, *arguments)
        assert got == status
        assert len(err.splitlines()) == 1


def test_people_get_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """One figure a line."""
    status, out, _ = run(capsys, str(SHIPPED / "14-chat-n3.json"), "--path", CHAT)
    assert status == 0
    assert "sequences          3\n" in out
    assert "stream             false\n" in out
    assert "images             none\n" in out


@pytest.mark.parametrize("model", ["a\\ud83d", "a\\nb", "a\\u001b[31m"])
def test_what_no_terminal_shows_is_escaped(model: str, tmp_path: Path) -> None:
    """A lone surrogate, a line break, an escape sequence in a client's string: one line, in any encoding, and no traceback."""
    body = tmp_path / "body.json"
    body.write_text('{"model":"' + model + '","messages":[],"n":3}')
    for encoding in ("utf-8", "ascii"):
        done = subprocess.run(
            [sys.executable, "-m", "extproc.cli", "count", str(body), "--path", CHAT],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            check=False,
        )
        lines = done.stdout.decode("ascii").splitlines()
        assert (done.returncode, done.stderr) == (0, b"")
        shown = next(line.split(maxsplit=1)[1] for line in lines if line.startswith("model"))
        assert json.loads(f'"{model}"') == shown.encode("ascii").decode("unicode_escape")
        assert len(lines) == 14


def test_a_refusal_that_quotes_the_client_is_one_line(tmp_path: Path) -> None:
    """On standard error too."""
    body = tmp_path / "body.json"
    body.write_text('{"messages":[{"role":"user","content":"x","Content":"\\ud83d"}],"\\ud83d":1}')
    done = subprocess.run(
        [sys.executable, "-m", "extproc.cli", "count", str(body), "--path", "/api/chat/\udcff/../api/chat"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert len(done.stderr.decode("ascii").splitlines()) == 1
