"""Records of the access log against a ledger in memory: what ends what, and what must not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from extproc.accesslog import EntryKind, LogRecord
from extproc.backlog import Backlog
from extproc.completion import Completion
from extproc.config.models import Config
from extproc.decisions import Identity
from extproc.learning import Learning
from extproc.ledger.base import SILENCE_S, Candidate, Ended, ReserveRequest
from extproc.ledger.inmemory import InMemoryLedger
from extproc.ledger.posture import LocalShare
from extproc.metadata import exchange_id
from extproc.types import Need

ENVOY = "envoy-1"
BEGAN_US = 1_800_000_000_000_000


class Heard:
    """Wants to know which decisions were in vain."""

    def __init__(self) -> None:
        self.in_vain: list[str] = []
        self.told = asyncio.Event()

    def unsent(self, rid: str) -> None:
        """Note it."""
        self.in_vain.append(rid)
        self.told.set()

    def completed(self, record: LogRecord, output_tokens: int | None) -> None:
        """Nothing."""

    def misrouted(self, record: LogRecord) -> None:
        """Nothing."""


class Parts:
    """A completion with its ledger and a clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0
        config = Config.model_validate(
            {
                "targets": {
                    "big": {"engine": "vllm", "replicas": [{"name": "big-0", "url": "http://127.0.0.1:1"}]},
                    "pool": {
                        "engine": "vllm",
                        "replicas": [{"name": "pool", "url": "http://engines:1", "discover": "dns"}],
                    },
                    "far": {"engine": "openai", "url": "https://127.0.0.1:2"},
                }
            }
        )
        self.ledger = InMemoryLedger(self.clock_s, periodic_s=1.0)
        self.observer = Heard()
        self.completion = Completion(
            config,
            self.ledger,
            Learning(),
            LocalShare(),
            self.observer,
            lambda _: None,
            lambda: None,
            self.clock_s,
            Backlog(),
        )

    def clock_s(self) -> float:
        return self.now_s

    async def reserve(self, rid: str, began_us: int, replica: str = "big-0") -> Identity:
        """A reservation of ten blocks under the request id that this client sends with everything."""
        who = Identity(rid, ENVOY, "same", exchange_id("same", began_us))
        need = Need(kv_blocks=10, input_blocks=5, kv_bytes=0, prefill_tokens=0, sequences=1)
        place = Candidate("big", replica, False, need, static_capacity_blocks=100, watermark=0.0)
        result = await self.ledger.reserve(
            ReserveRequest(rid, "lane", ENVOY, who.exchange_id, "chat:s:-:none", 80, 80, 80, candidates=[place])
        )
        assert result.chosen == 0
        return who

    async def rids(self) -> set[str]:
        await self.completion.flush()
        return {live.reservation.rid for live in await self.ledger.reservations("big-0")}


def over(began_us: int, *, status: int | None = None, fields: Mapping[str, str | float] | None = None) -> LogRecord:
    """The end of an exchange of which Envoy had no metadata of ours, unless ``fields`` are given."""
    fields = fields or {}
    rid = fields.get("rid")
    return LogRecord(
        kind=EntryKind.END, rid=rid if isinstance(rid, str) else None, request_id="same", cluster="", fields=fields,
        usage={}, how=Ended.CLIENT_ABORT if status is None else Ended.UPSTREAM_ERROR, status=status, began_us=began_us,
        began_age_s=0.2, ended_age_s=0.0, first_byte_age_s=None, duration_s=0.2, response_bytes=0, attempts=0,
    )  # fmt: skip


@pytest.mark.parametrize("status", [None, 503])
@pytest.mark.parametrize("answered_first", [True, False])
async def test_an_answer_that_crosses_the_end_of_its_exchange(answered_first: bool, status: int | None) -> None:
    """Whichever comes first, the reservation goes at once; those of the client's other exchanges stay."""
    parts = Parts()
    other = await parts.reserve("other", BEGAN_US)
    parts.completion.answered(other)
    mine = await parts.reserve("mine", BEGAN_US + 1)
    if answered_first:
        parts.completion.answered(mine)
        parts.completion.record(over(BEGAN_US + 1, status=status), ENVOY)
    else:
        parts.completion.record(over(BEGAN_US + 1, status=status), ENVOY)
        parts.completion.answered(mine)
    assert await parts.rids() == {"other"}
    await asyncio.wait_for(parts.observer.told.wait(), 60.0)
    assert parts.observer.in_vain == ["mine"]  # else the decision would look as if it ran for ever


async def test_another_envoys_exchange_is_not_ours() -> None:
    """The same request id and the same microsecond at another Envoy are another exchange."""
    parts = Parts()
    parts.completion.answered(await parts.reserve("mine", BEGAN_US))
    parts.completion.record(over(BEGAN_US), "envoy-2")
    assert await parts.rids() == {"mine"}


async def test_crossings_are_forgotten() -> None:
    """What never crosses is not remembered for ever."""
    parts = Parts()
    for number in range(10_000):
        parts.completion.answered(Identity(f"r{number}", ENVOY, "same", exchange_id("same", BEGAN_US + number)))
    assert len(parts.completion._crossing) <= 4096


async def test_an_end_that_knows_the_answer_forgets_its_crossing() -> None:
    """Memory follows what is in flight, not how much was ever answered."""
    parts = Parts()
    for number in range(100):
        parts.completion.answered(Identity(f"r{number}", ENVOY, "same", exchange_id("same", BEGAN_US + number)))
        parts.completion.record(over(BEGAN_US + number, status=503, fields={"rid": f"r{number}"}), ENVOY)
    assert not parts.completion._crossing


async def test_silence_counts_from_when_an_envoy_is_heard() -> None:
    """An Envoy whose log has just begun proves nothing by its silence, however long we have run."""
    parts = Parts()
    parts.completion.attach("early")
    parts.now_s += SILENCE_S
    parts.completion.attach(ENVOY)
    assert parts.completion.listened(parts.now_s) == (SILENCE_S, ("early",))
    parts.completion.detach("early")
    assert parts.completion.listened(parts.now_s) == (None, ())


def attempt(cluster: str, *, status: int = 200, closed_for_s: float | None = None, rid: str = "mine") -> LogRecord:
    """The end of one attempt at ``cluster``."""
    return replace(
        over(BEGAN_US), kind=EntryKind.ATTEMPT_END, rid=rid, cluster=cluster, status=status, closed_for_s=closed_for_s,
        how=Ended.COMPLETE if status == 200 else Ended.UPSTREAM_ERROR,
    )  # fmt: skip


async def test_a_remote_that_wants_no_more_is_told_to_everybody_once_a_second() -> None:
    """The ledger shows it as draining for as long as it said; nothing is told of a local engine's 429."""
    parts = Parts()
    parts.completion.record(attempt("far", status=429, closed_for_s=7.0), ENVOY)
    parts.completion.record(attempt("big-0", status=429, closed_for_s=7.0), ENVOY)
    await parts.completion.flush()
    assert {name: view.state for name, view in (await parts.ledger.snapshot()).replicas.items()} == {"far": "draining"}
    parts.now_s += 0.5
    parts.completion.record(attempt("far", status=429, closed_for_s=60.0), ENVOY)
    await parts.completion.flush()
    parts.now_s += 7.0
    assert (await parts.ledger.snapshot()).replicas["far"].state == "unknown"


async def test_an_attempt_at_found_replicas_ends_the_reservation_at_the_one_it_reached() -> None:
    """Envoy's log names their common cluster; a plan has one local place, so it is the reserved one."""
    parts = Parts()
    await parts.reserve("mine", BEGAN_US, "pool@10.0.0.7")
    parts.completion.record(attempt("far", rid="mine"), ENVOY)
    await parts.completion.flush()
    assert len(await parts.ledger.reservations("pool@10.0.0.7")) == 1
    parts.completion.record(attempt("pool", rid="mine"), ENVOY)
    await parts.completion.flush()
    assert await parts.ledger.reservations("pool@10.0.0.7") == []
