"""One replica's state machine: freshness, recovery, restarts, wedging, on invented scrapes and clocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from extproc.agent.engines import ENGINES
from extproc.agent.engines.base import Answer, Hints
from extproc.agent.http import Cause
from extproc.agent.watch import Origin, ReplicaWatch, Scrape
from extproc.ledger.base import ReplicaReport, ReplicaState

OFFSET_S = 1_000_000.0
WALL_S = 1_795_000_000.0
READY, LOST, UNKNOWN, WEDGED, DRAINING = (
    ReplicaState.READY, ReplicaState.LOST, ReplicaState.UNKNOWN, ReplicaState.WEDGED, ReplicaState.DRAINING,
)  # fmt: skip


class Engine:
    """A vLLM or llama.cpp server on paper, scraped once a second."""

    def __init__(self, name: str = "vllm", unknown_s: float = 15.0) -> None:
        self.watch = ReplicaWatch(Origin("r", "t", "n", "i"), ENGINES[name], Hints(), unknown_s=unknown_s)
        self.now_s = 100.0
        self.running, self.waiting, self.tokens, self.usage = 0, 0, 1000.0, "0.5"
        self.started: float | None = WALL_S - 500
        self.marker = "a"
        self.health = 200
        self.paused: bool | None = None
        self.extra = ""
        self.name = name

    def answers(self) -> Mapping[str, Answer]:
        """What the server answers now."""
        if self.name == "llamacpp":
            props = {"total_slots": 2, "default_generation_settings": {"n_ctx": 4096}, "media_marker": self.marker}
            metrics = (
                f"llamacpp:requests_processing {self.running}\nllamacpp:requests_deferred {self.waiting}\n"
                f"llamacpp:n_decode_total {self.tokens}\nllamacpp:prompt_tokens_total {self.tokens}\n"
            )
            return {
                "/health": Answer(self.health),
                "/slots": Answer(200, b"[]"),
                "/metrics": Answer(200, metrics.encode()),
                "/props": Answer(200, json.dumps(props).encode()),
            }
        metrics = (
            f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting {self.waiting}\n"
            f"vllm:kv_cache_usage_perc {self.usage}\nvllm:generation_tokens_total {self.tokens}\n"
            'vllm:cache_config_info{num_gpu_blocks="101",block_size="16"} 1\n' + self.extra
        )
        if self.started is not None:
            metrics += f"process_start_time_seconds {self.started}\n"
        return {
            "/health": Answer(self.health),
            "/metrics": Answer(200, metrics.encode()),
            "/v1/models": Answer(200, b'{"data": [{"id": "m", "max_model_len": 1600}]}'),
            "/is_paused": Answer(404)
            if self.paused is None
            else Answer(200, json.dumps({"is_paused": self.paused}).encode()),
        }

    def scrape(self, *, seconds: float = 1.0, cause: Cause | None = None) -> ReplicaReport:
        """One visit after ``seconds``; a failing one where ``cause`` is given."""
        self.now_s += seconds
        due = self.watch.due()
        given = self.answers()
        answers = {} if cause else {path: given[path] for path in due}
        failures = dict.fromkeys(due, cause) if cause else {}
        scrape = Scrape(self.now_s - 0.01, self.now_s, answers, failures)  # type: ignore[arg-type]
        self.watch.observe(scrape, offset_s=OFFSET_S, wall_s=WALL_S + self.now_s)
        return self.report()

    def report(self) -> ReplicaReport:
        """The report now."""
        return self.watch.report(mono_s=self.now_s, offset_s=OFFSET_S)


def test_nothing_is_offered_before_the_first_good_scrape() -> None:
    """Before any answer the replica is unknown; the first good scrape makes it ready (a18)."""
    engine = Engine()
    assert engine.report().state is UNKNOWN
    assert engine.report().capacity_blocks is None
    report = engine.scrape()
    assert (report.state, report.capacity_blocks, report.used_blocks) == (READY, 100, 50)


def test_scrape_times_are_on_the_ledgers_clock() -> None:
    """Start and end are those of the visit, moved by the round's offset."""
    report = Engine().scrape()
    assert (report.scrape_start_at_s, report.scrape_end_at_s) == (
        pytest.approx(OFFSET_S + 100.99), pytest.approx(OFFSET_S + 101.0),
    )  # fmt: skip


def test_a_scrapes_time_is_told_once() -> None:
    """The round's offset jitters; a report that repeats a scrape must not seem older than the last, or it is refused."""
    engine = Engine()
    engine.scrape()
    engine.scrape(cause=Cause.REFUSED)
    told = {
        engine.watch.report(mono_s=engine.now_s, offset_s=OFFSET_S + jitter_s).scrape_start_at_s
        for jitter_s in (0.0, -0.002, 0.001)
    }
    assert len(told) == 1
    assert told.pop() == pytest.approx(OFFSET_S + 100.99)


@pytest.mark.parametrize("cause", [Cause.REFUSED, Cause.RESET])
def test_refused_is_lost_at_once_and_returns_after_two_good_scrapes(cause: Cause) -> None:
    """One refused visit takes the replica out; one good one is not yet enough."""
    engine = Engine()
    engine.scrape()
    assert engine.scrape(cause=cause).state is LOST
    assert [engine.scrape().state for _ in range(3)] == [UNKNOWN, READY, READY]


def test_a_gone_engine_shows_no_load_and_no_room() -> None:
    """Lost or too old: what it last showed is not told again, neither as load nor as an empty pool (a19)."""
    engine = Engine()
    engine.running = 7
    engine.scrape()
    late = engine.scrape(seconds=16, cause=Cause.TIMEOUT)
    lost = engine.scrape(cause=Cause.REFUSED)
    for report in (late, lost):
        assert (report.used_blocks, report.running, report.waiting, report.capacity_blocks) == (None, None, None, 100)


def test_a_late_answer_ages_and_is_never_read_as_empty() -> None:
    """Time-outs keep the last reading with its old times until it is 15 s old, then it is unknown."""
    engine = Engine()
    first = engine.scrape()
    late = [engine.scrape(seconds=3, cause=Cause.TIMEOUT) for _ in range(6)]
    assert [report.state for report in late] == [READY] * 5 + [UNKNOWN]
    assert {report.scrape_end_at_s for report in late} == {first.scrape_end_at_s}
    assert engine.scrape().state is READY


@pytest.mark.parametrize("usage", ["NaN", "1.7", "-0.1", "+Inf"])
def test_absurd_usage_is_unknown(usage: str) -> None:
    """NaN and figures outside 0..1 make the replica unknown, not empty and not full."""
    engine = Engine()
    engine.scrape()
    engine.usage = usage
    report = engine.scrape()
    assert (report.state, report.used_blocks) == (UNKNOWN, None)


def test_dead_engine_behind_a_living_server_is_lost() -> None:
    """/metrics answers 200 with the last figures, /health says 503: the engine is gone."""
    engine = Engine()
    engine.scrape()
    engine.health = 503
    assert engine.scrape().state is LOST


def test_work_in_flight_with_flat_counters_is_wedged() -> None:
    """30 s of running requests without one token: wedged; a token and it comes back after two scrapes."""
    engine = Engine()
    engine.running = 3
    states = [engine.scrape().state for _ in range(32)]
    assert states[:30] == [READY] * 30
    assert states[-1] is WEDGED
    states = []
    for _ in range(2):
        engine.tokens += 5
        states.append(engine.scrape().state)
    assert states == [UNKNOWN, READY]


def test_a_queue_while_nothing_runs_is_wedged_sooner() -> None:
    """running = 0 with requests waiting for 10 s: nothing schedules them."""
    engine = Engine()
    engine.waiting = 2
    states = [engine.scrape().state for _ in range(12)]
    assert (states[9], states[-1]) == (READY, WEDGED)


def test_an_idle_engine_is_not_wedged() -> None:
    """Flat counters mean nothing while nothing is in flight."""
    engine = Engine()
    assert {engine.scrape().state for _ in range(60)} == {READY}


def test_progress_resets_the_wedge_clock() -> None:
    """A slow engine that moves at all is not wedged."""
    engine = Engine()
    engine.running = 1
    states = set()
    for second in range(100):
        engine.tokens += 1 if second % 20 == 0 else 0
        states.add(engine.scrape().state)
    assert states == {READY}


def test_sleeping_engine_takes_no_work() -> None:
    """vLLM asleep answers 200 on /health and lets requests hang."""
    engine = Engine()
    engine.scrape()
    engine.extra = 'vllm:engine_sleep_state{sleep_state="awake"} 0\n'
    assert engine.scrape().state is DRAINING


def test_paused_engine_takes_no_work() -> None:
    """vLLM after /pause shows no request at all and a good health; /is_paused is looked at every third round."""
    engine = Engine()
    engine.paused = False
    assert engine.scrape().state is READY
    engine.paused = True
    assert DRAINING in [engine.scrape().state for _ in range(3)]
    engine.paused = False
    assert [engine.scrape().state for _ in range(5)][-1] is READY


def test_start_is_told_once_and_a_later_process_moves_it() -> None:
    """The start does not jitter with the clocks; another process under the URL has its own, later one."""
    engine = Engine()
    first = engine.scrape().engine_started_at_s
    assert first == pytest.approx(OFFSET_S + 101.0 - (WALL_S + 101.0 - (WALL_S - 500)))
    assert engine.scrape(seconds=1.3).engine_started_at_s == first
    engine.started = WALL_S + engine.now_s
    second = engine.scrape().engine_started_at_s
    assert first is not None
    assert second is not None
    assert second > first
    assert engine.watch.restarts == 1


def test_start_without_a_date_is_when_nobody_listened_last() -> None:
    """llama.cpp tells no start: the last refused visit, or the last scrape of the old process, bounds it from below."""
    engine = Engine("llamacpp")
    assert engine.scrape().engine_started_at_s is None
    engine.scrape(cause=Cause.REFUSED)
    refused_s = engine.now_s - 0.01
    engine.marker = "b"
    assert engine.scrape().engine_started_at_s == OFFSET_S + refused_s


def test_a_restart_between_two_scrapes_is_seen_by_falling_counters() -> None:
    """No failure was seen, /props is read rarely: the reset asks for it again and the next scrape knows."""
    engine = Engine("llamacpp")
    engine.scrape()
    engine.scrape()
    old_s = engine.now_s
    engine.marker, engine.tokens = "b", 0.0
    engine.scrape()
    report = engine.scrape()
    assert report.engine_started_at_s is not None
    assert OFFSET_S + old_s <= report.engine_started_at_s <= OFFSET_S + engine.now_s
    assert engine.watch.restarts == 1


def test_servers_that_alternate_under_one_url_are_unknown() -> None:
    """Parts of an unknown whole (several API servers, a load balancer) admit nothing and void nothing again and again."""
    engine = Engine("llamacpp")
    starts = set()
    for turn in range(20):
        engine.marker = "ab"[turn % 2]
        engine.watch._due.clear()
        starts.add(engine.scrape().engine_started_at_s)
    assert engine.report().state is UNKNOWN
    assert len(starts) == 2


def test_optional_endpoints_never_block() -> None:
    """/slots and /metrics of llama.cpp may be off; capacity alone suffices (g05)."""
    engine = Engine("llamacpp")
    engine.now_s += 1
    given = engine.answers()
    scrape = Scrape(100.9, 101.0, {path: given[path] for path in ("/health", "/props")}, {"/slots": Cause.TIMEOUT})
    engine.watch.observe(scrape, offset_s=OFFSET_S, wall_s=WALL_S)
    report = engine.report()
    assert (report.state, report.capacity_blocks, report.running) == (READY, 4096, None)


def test_a_device_lost_takes_its_replica_with_it() -> None:
    """Any lost device of the replica (one shard of a TP group) makes it lost and what was reserved before void, once."""
    engine = Engine()
    engine.scrape()
    engine.watch.devices(lost=False, mono_s=engine.now_s, offset_s=OFFSET_S)
    started = engine.report().engine_started_at_s
    for _ in range(3):
        engine.scrape()
        engine.watch.devices(lost=True, mono_s=engine.now_s, offset_s=OFFSET_S)
    assert engine.report().state is LOST
    assert started is not None
    assert started < OFFSET_S + 100
    assert engine.report().engine_started_at_s == OFFSET_S + 102
    engine.watch.devices(lost=False, mono_s=engine.now_s, offset_s=OFFSET_S)
    assert (engine.report().state, engine.report().engine_started_at_s) == (READY, OFFSET_S + 102)


class Remote:
    """An API on paper, visited every ten seconds."""

    def __init__(self) -> None:
        self.watch = ReplicaWatch(Origin("far", "far", "n", "i"), ENGINES["openai"], Hints(), unknown_s=15.0)
        self.now_s = 100.0

    def visit(self, status: int = 401, cause: Cause | None = None, **headers: str) -> ReplicaState:
        """One visit, ten seconds after the last."""
        self.now_s += 10
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        answers = {} if cause else {"/v1/models": Answer(status, b"{}", names)}
        failures = {"/v1/models": cause} if cause else {}
        self.watch.observe(Scrape(self.now_s - 0.1, self.now_s, answers, failures), offset_s=OFFSET_S, wall_s=WALL_S)
        return self.watch.report(mono_s=self.now_s, offset_s=OFFSET_S).state


def test_a_remote_that_answers_a_stranger_lives() -> None:
    """No credential is sent: 401, 403 and 404 are the answers of a healthy API; a 5xx is not."""
    remote = Remote()
    assert [remote.visit(status) for status in (200, 401, 403, 404)] == [READY] * 4
    assert [remote.visit(status) for status in (500, 502, 503)] == [LOST] * 3
    assert remote.visit() is READY


def test_a_remote_that_refuses_is_lost_at_once_and_a_silent_one_after_two_visits() -> None:
    """A name that is gone, broken TLS, a time-out: once may be chance; one good visit brings it back."""
    remote = Remote()
    assert [remote.visit(), remote.visit(cause=Cause.REFUSED), remote.visit()] == [READY, LOST, READY]
    for cause in (Cause.TIMEOUT, Cause.NAME, Cause.TLS, Cause.NETWORK):
        assert [remote.visit(cause=cause), remote.visit(cause=cause), remote.visit()] == [READY, LOST, READY]


def test_a_remote_out_of_quota_drains() -> None:
    """429 and a limit at zero close it until it says otherwise."""
    remote = Remote()
    assert remote.visit(429, retry_after="20") is DRAINING
    assert remote.watch.reading is not None
    assert remote.watch.reading.closed_for_s == 20.0
    assert remote.visit(200, x_ratelimit_remaining_requests="3") is READY
    assert remote.visit(200, x_ratelimit_remaining_requests="0", x_ratelimit_reset_requests="30s") is DRAINING
    assert "no_more: for 30 s (200)" in remote.watch.reading.notes
    assert remote.visit(200) is READY


def test_a_leaving_replica_drains_until_idle() -> None:
    """Gone from discovery: no new work, kept while something runs."""
    engine = Engine()
    engine.running = 1
    engine.scrape()
    engine.watch.leaving = True
    assert (engine.report().state, engine.watch.idle()) == (DRAINING, False)
    engine.running = 0
    engine.scrape()
    assert engine.watch.idle()


def test_slow_facts_are_read_again_after_a_failure() -> None:
    """After any failure every endpoint is due, since another configuration may answer."""
    engine = Engine()
    engine.scrape()
    assert "/v1/models" not in engine.watch.due()
    engine.scrape(cause=Cause.TIMEOUT)
    assert "/v1/models" in engine.watch.due()


def test_hints_stand_in_where_the_engine_is_silent() -> None:
    """An operator's sequences count where vLLM shows none."""
    engine = Engine()
    engine.watch.hints = replace(engine.watch.hints, max_sequences=64)
    assert engine.scrape().max_sequences == 64
