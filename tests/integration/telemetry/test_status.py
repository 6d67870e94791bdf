"""`kvgate status` against a real ledger."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from extproc.cli import main
from extproc.commands import status
from extproc.errors import ConfigError
from extproc.ledger.base import Candidate, ReserveRequest
from extproc.ledger.redis import RedisLedger
from extproc.telemetry.decisionlog import StreamLog, end_record
from extproc.telemetry.record import decision_record
from extproc.telemetry.state import snapshot_from_state
from tests.support.valkey import ValkeyServer, free_port
from tests.unit.telemetry.samples import FALLBACK, NEED, REJECT, snapshot

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config_file(tmp_path: Path, valkey: ValkeyServer, pool: str) -> Path:
    """Two replicas, of which an agent reports one."""
    path = tmp_path / "kvgate.yaml"
    path.write_text(
        f"ledger: {{url: '{valkey.url}', pool: {pool}}}\n"
        "targets:\n"
        "  primary-32b: {engine: vllm, servedModel: m, replicas: [{name: gpu-a-0, url: 'http://127.0.0.1:1'}]}\n"
        "  qwen-14b-q4: {engine: vllm, servedModel: m, replicas: [{name: gpu-b-0, url: 'http://127.0.0.1:2'}]}\n"
        "lanes: {fast-edit: {targets: [primary-32b, qwen-14b-q4]}, batch: {targets: [primary-32b]}}\n"
    )
    return path


@pytest.fixture
async def busy(valkey: ValkeyServer, pool: str) -> AsyncIterator[RedisLedger]:
    """One fresh report, one reservation, two decisions of which one has ended."""
    ledger = await RedisLedger.connect(
        valkey.url, pool, deadline_s=60.0, background_deadline_s=60.0, wait_s=60.0, fresh=True
    )
    now_s = await ledger.time_s()
    taken, _ = snapshot()
    report = taken.replicas["gpu-a-0"].report
    assert report is not None
    report = replace(
        report, scrape_start_at_s=now_s, scrape_end_at_s=now_s, used_blocks=0, running=0, engine_started_at_s=now_s - 60
    )
    device = replace(taken.devices["GPU-1"], scrape_start_at_s=now_s)
    await ledger.publish([report], [device], ttl_s=30.0)
    candidate = Candidate("primary-32b", "gpu-a-0", remote=False, need=NEED, cap_blocks=278)
    request = ReserveRequest("rid-1", "fast-edit", "envoy-1", "x-1", "none:s", 4123, 310, 1200, [candidate], lease_s=30)
    assert (await ledger.reserve(request)).chosen == 0
    log = StreamLog(valkey.url, pool, 100)
    for decision in (FALLBACK, REJECT):
        log.append(decision_record(decision, at_s=1764421200.0, decision_ms=1.3, count_ms=0.4, request_id="x-1"))
    log.end(end_record("rid-1", ended="complete", actual_output_tokens=298))
    await log.close()
    yield ledger
    await ledger.close()


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    status.configure(parser)
    return parser.parse_args(words)


async def run(*words: str) -> int:
    """The command in a thread, because it brings its own event loop."""
    return await asyncio.to_thread(status.run, arguments(*words))


@pytest.mark.usefixtures("busy")
async def test_json_has_the_schema(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ledger, state and recent have the schema's fields with what the ledger holds."""
    assert await run("-c", str(config_file), "--json") == 0
    page: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(page) == {"ledger", "state", "recent"}
    assert (page["ledger"]["state"], page["ledger"]["reservations"]) == ("ok", 1)
    assert (page["ledger"]["orphaned"], page["ledger"]["over_admissions"]) == (0, 0)
    assert page["ledger"]["latency_ms"] > 0
    order = [(row["target"], row["replica"]) for row in page["state"]["replicas"]]
    assert order == sorted(order)
    replicas = {row["replica"]: row for row in page["state"]["replicas"]}
    assert replicas["gpu-a-0"]["state"] == "ready"
    assert replicas["gpu-a-0"]["kv_headroom_blocks"] == 4096 - 82 - 278  # 2 % watermark
    (held,) = replicas["gpu-a-0"]["reservations"]
    assert (held["rid"], held["blocks"], held["state"], held["input_tokens"]) == ("rid-1", 278, "reserved", 4123)
    assert (replicas["gpu-b-0"]["state"], replicas["gpu-b-0"]["target"]) == ("unknown", "qwen-14b-q4")
    assert page["state"]["lanes"] == [{"lane": "fast-edit", "in_flight": 1}, {"lane": "batch", "in_flight": 0}]
    assert page["state"]["devices"][0]["free_bytes"] == 6442450944
    assert [(row["rid"], row["ended"]) for row in page["recent"]] == [("rid-3", None), ("rid-1", "complete")]


async def test_state_reads_back_as_the_ledgers_snapshot(
    busy: RedisLedger, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `status --json` prints is a state that explain and plan read as the ledger sees itself."""
    assert await run("-c", str(config_file), "--json") == 0
    back, live = snapshot_from_state(json.loads(capsys.readouterr().out))
    seen = (await busy.snapshot()).replicas["gpu-a-0"]
    view = back.replicas["gpu-a-0"]
    assert view.report is not None
    assert seen.report is not None
    assert (view.headroom_blocks, view.committed_blocks) == (seen.headroom_blocks, seen.committed_blocks)
    assert (view.report.capacity_blocks, view.report.block_tokens) == (seen.report.capacity_blocks, 16)
    (truth,) = await busy.reservations("gpu-a-0")
    assert live["gpu-a-0"][0].reservation.need == truth.reservation.need


@pytest.mark.usefixtures("busy")
async def test_text_shows_headroom_and_decisions(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """People get the table: headroom in MiB, the decisions' three figures, the end."""
    assert await run("-c", str(config_file)) == 0
    lines = capsys.readouterr().out.splitlines()
    replica = next(line for line in lines if line.startswith("gpu-a-0"))
    assert replica.split()[2:6] == ["ready", replica.split()[3], "s", "1.0"]
    assert "934.0 MiB" in replica
    assert any("reject:insufficient_headroom" in line and "-39.5 MiB" in line for line in lines)
    assert any("fallback:qwen-14b-q4" in line and line.endswith("complete  rid-1") for line in lines)


@pytest.mark.usefixtures("busy")
async def test_recent_limits_the_decisions(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--recent N` shows at most N, `--recent 0` none."""
    for count in (0, 1):
        assert await run("-c", str(config_file), "--json", "--recent", str(count)) == 0
        assert len(json.loads(capsys.readouterr().out)["recent"]) == count


def with_geometry(config_file: Path, geometry: str) -> str:
    """A copy of the file whose targets have a model of this geometry."""
    text = config_file.read_text().replace("engine: vllm, servedModel: m", "engine: vllm, model: m")
    copy = config_file.with_name("known.yaml")
    copy.write_text(f"{text}models: {{m: {{geometry: {geometry}}}}}\n")
    return str(copy)


@pytest.mark.usefixtures("busy")
async def test_blocks_are_bytes_where_the_geometry_is_known(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replica that holds nothing and was never asked is shown in bytes too; its files may also lie elsewhere."""
    for geometry, reserved in (("Qwen/Qwen3-8B", "0 B"), ("/elsewhere/config.json", "0 blocks")):
        assert await run("-c", with_geometry(config_file, geometry), "--recent", "0") == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("gpu-b-0"))
        assert reserved in row


async def test_release_takes_what_status_shows(
    busy: RedisLedger, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The RID and the request id of the table both name the reservation; a second try finds none."""
    for shown, released in (("x-1", "rid-1"), ("rid-1", None)):
        code = await asyncio.to_thread(main, ["release", shown, "-c", str(config_file)])
        out, err = capsys.readouterr()
        assert (code, out) == ((0, f"{released}: released\n") if released else (1, ""))
        assert bool(err) is (released is None)
    assert await busy.reservations("gpu-a-0") == []


async def test_one_request_id_of_several_reservations_is_asked_back(
    busy: RedisLedger, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client that sends one id with everything does not lose a reservation that nobody meant."""
    candidate = Candidate("primary-32b", "gpu-a-0", remote=False, need=NEED, cap_blocks=278)
    await busy.reserve(
        ReserveRequest("rid-2", "fast-edit", "envoy-1", "x-1", "none:s", 4123, 310, 1200, [candidate], lease_s=30)
    )
    assert await asyncio.to_thread(main, ["release", "x-1", "-c", str(config_file)]) == 1
    said = capsys.readouterr().err
    assert "2 live reservations have this request id" in said
    assert "rid-1" in said
    assert "rid-2" in said


async def test_a_ledger_that_is_away_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No server: exit status 1 and one line with the file and the mend."""
    path = tmp_path / "kvgate.yaml"
    path.write_text(f"ledger: {{url: 'redis://127.0.0.1:{free_port()}/0'}}\nlanes: {{l: {{}}}}\n")
    assert await run("-c", str(path)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{path}: ledger.url: ledger away")
    assert line.endswith("start the ledger or correct its address")


@pytest.mark.parametrize(
    ("words", "code", "beginning"),
    [
        (("--ledger", "memory"), 1, "--ledger: 'memory' cannot be read from here"),
        (("--ledger", "embedded"), 1, "--ledger: 'embedded' cannot be read from here"),
        (("--recent", "-1"), 2, "--recent: -1 is not a number of decisions"),
    ],
)
def test_what_cannot_work_is_one_line(
    words: tuple[str, ...], code: int, beginning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Usage mistakes and ledgers that nobody else can see are said in one line."""
    assert main(["status", *words]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(beginning)


def test_a_broken_address_is_one_line() -> None:
    """An address that is none names where it stands."""
    with pytest.raises(ConfigError) as caught:
        status.run(arguments("--ledger", "foo://x"))
    assert str(caught.value).startswith("--ledger: ledger URL scheme 'foo'")


@pytest.mark.usefixtures("busy")
async def test_watch_goes_on_until_interrupted(config_file: Path) -> None:
    """`--watch --json` prints one object per page and ends with 0 on Ctrl-C."""
    code = (
        "import argparse, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whatever the tests were started with
        "from extproc.commands import status\n"
        "status.WATCH_S = 0.05\n"
        "parser = argparse.ArgumentParser()\n"
        "status.configure(parser)\n"
        "sys.exit(status.run(parser.parse_args()))\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "-c", str(config_file), "--watch", "--json"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        for _ in range(3):
            page = json.loads(await process.stdout.readline())
            assert page["ledger"]["reservations"] == 1
        process.send_signal(signal.SIGINT)
        await process.communicate()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
