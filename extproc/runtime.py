"""Puts the parts of ``kvgate serve`` together for one configuration and runs them until told to stop.

Owns the wiring and the order of start and stop; decides nothing. One runtime is one process on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import secrets
import signal
import socket
import time
from collections.abc import Callable

from extproc.admin import AdminServer, Answer
from extproc.admission import Admission
from extproc.backlog import Backlog
from extproc.candidates import Planner
from extproc.completion import Completion
from extproc.config.models import Config
from extproc.counting import Counting
from extproc.errors import ConfigError, LedgerDown
from extproc.fleet import Fleet
from extproc.gate import Gate
from extproc.holding import Holding
from extproc.learning import Learning
from extproc.ledger.base import Ledger, LedgerSnapshot
from extproc.ledger.inmemory import InMemoryLedger
from extproc.ledger.posture import BEAT_S, BEAT_TTL_S, LocalShare
from extproc.ledger.redis import RedisLedger
from extproc.listening import cannot_bind
from extproc.modelset import ModelSet
from extproc.observe import Observer
from extproc.server import Service, start
from extproc.telemetry.decisionlog import DecisionLog, RingLog, StreamLog
from extproc.telemetry.ledgerwatch import watched
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.spans import Spans
from extproc.types import Decision
from extproc.version import VERSION

log = logging.getLogger("kvgate.serve")

#: Envoy's health check runs twice a second and believes the second answer: until then it sends new streams here,
#: and they are served.
DRAIN_S = 1.5
#: How often it tells what it learned from answers, and hears what the others did.
LESSON_S = 5.0
#: After the drain, streams that are still undecided get this long.
GRACE_S = 2.0


async def open_ledger(config: Config) -> Ledger:
    """The ledger the configuration names, whether or not it answers now; ``ConfigError`` where it can never."""
    settings = config.ledger
    where = f"{config.where}: ledger.url"
    if settings.url == "memory":
        return InMemoryLedger(time.time, periodic_s=config.envoy.periodic_s)
    if settings.url == "embedded":
        raise ConfigError([f"{where}: `embedded` works with `kvgate up` only; name a redis:// address"])
    try:
        return await RedisLedger.connect(
            settings.url,
            settings.pool,
            deadline_s=settings.deadline_ms / 1000.0,
            periodic_s=config.envoy.periodic_s,
        )
    except (ValueError, OSError) as error:
        raise ConfigError([f"{where}: {error}; correct the address"]) from error


class Runtime:
    """The parts of one process; ``clock_s`` is monotonic, ``spread`` draws from [0, 1) for retry times."""

    def __init__(
        self,
        config: Config,
        models: ModelSet,
        ledger: Ledger,
        decisions: DecisionLog,
        metrics: Metrics,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self.config = config
        self.ledger = ledger
        self.metrics = metrics
        self.decisions = decisions
        self._instance = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        self.gate = Gate()
        self.learning = Learning()
        self.share = LocalShare(known=False)
        lines = {name: lane.queue for name, lane in config.lanes.items() if lane.queue is not None}
        self.holding: Holding[Decision] = Holding(lines, metrics.queue_depth)
        self.fleet = Fleet(ledger, self._saw, clock_s)
        self.spans = Spans.from_config(config.telemetry, version=VERSION, on_result=metrics.spans)
        self.counting = Counting.from_config(config)
        metrics.watch_counting(self.counting.stats, self.counting.remembered_bytes)
        observer = Observer(metrics, self.spans, decisions, self.fleet)
        self.admission = Admission(
            config,
            planner=Planner(config, models.kv),
            counting=self.counting,
            ledger=ledger,
            fleet=self.fleet,
            learning=self.learning,
            share=self.share,
            holding=self.holding,
            clock_s=clock_s,
            spread=spread,
        )
        self.backlog = Backlog()
        self.completion = Completion(
            config,
            ledger,
            self.learning,
            self.share,
            observer,
            self.fleet.view,
            self.holding.wake,
            clock_s,
            self.backlog,
        )
        self.service = Service(
            self.admission, self.completion, observer, self.gate, self.backlog, config.serve.max_body_bytes
        )
        self.admin = AdminServer({"/metrics": self._metrics, "/livez": self._livez, "/readyz": self._readyz})

    async def run(self, listen: str, admin: str, ready: Callable[[str], None], stop: asyncio.Event) -> None:
        """Serve until ``stop``; ``ready`` hears the bound address. ``ConfigError`` where one cannot be bound."""
        try:
            await self.admin.start(admin)
        except OSError as error:
            raise cannot_bind(f"{self.config.where}: serve.admin", admin, error) from error
        self.counting.start_giant_helper()
        await self.fleet.refresh()
        try:
            server = await start(self.service, listen, self.config.serve.max_body_bytes, ready)
        except (OSError, RuntimeError) as error:  # gRPC's for an address that it cannot have
            self.counting.close()
            raise cannot_bind(f"{self.config.where}: serve.listen", listen, error) from error
        self.gate.set(open_=True, wanted=True)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self.fleet.run()),
                tasks.create_task(self.completion.run()),
                tasks.create_task(self.completion.reap()),
                tasks.create_task(self._beat()),
                tasks.create_task(self._keep_learning()),
            ]
            await stop.wait()
            self.gate.set(open_=True, wanted=False)
            log.info("draining")
            await asyncio.sleep(DRAIN_S)
            self.gate.set(open_=False, wanted=False)
            await self.service.settle()
            await server.stop(GRACE_S)
            for task in running:
                task.cancel()
        await self.decisions.close()
        self.spans.close()
        await self.admin.close()
        self.counting.close()
        await self.ledger.close()
        log.info("stopped")

    async def _beat(self) -> None:
        """Tell the ledger that this instance lives, and keep the local share's view of how many do."""
        while True:
            live, sent_s = None, time.monotonic()
            with contextlib.suppress(LedgerDown):
                live = await self.ledger.heartbeat(self._instance, BEAT_TTL_S)
            self.share.beat(live, sent_s, time.monotonic())
            await asyncio.sleep(BEAT_S)

    async def share_lessons(self) -> None:
        """Tell the pool what answers taught this process, and take what the others know."""
        with contextlib.suppress(LedgerDown):
            self.learning.hear(await self.ledger.lessons(self.learning.tell()))

    async def _keep_learning(self) -> None:
        while True:
            await self.share_lessons()
            await asyncio.sleep(LESSON_S)

    def _saw(self, snapshot: LedgerSnapshot) -> None:
        self.metrics.fleet(snapshot)
        self.share.observe(snapshot)
        # Ends that other instances saw, and cooling that came to its end, show in a snapshot only.
        self.holding.wake()

    async def _metrics(self, accept: str) -> Answer:
        self.backlog.clear_now()
        kind, body = self.metrics.exposition(accept)
        return 200, kind, body

    async def _livez(self, _accept: str) -> Answer:
        return 200, "application/json", b'{"status":"alive"}\n'

    async def _readyz(self, _accept: str) -> Answer:
        components = {
            "gate": "ok" if self.gate.wanted else "draining",
            "ledger": "ok" if self.fleet.failures == 0 and self.fleet.snapshot is not None else "down",
        }
        # A ledger that is away is a posture, not an illness: the gate alone decides.
        body = json.dumps({"status": components["gate"], "components": components}).encode() + b"\n"
        return (200 if self.gate.wanted else 503), "application/json", body


async def serve(config: Config, *, where: str, listen: str, admin: str, ready: Callable[[str], None]) -> None:
    """Load everything, serve, and stop on SIGTERM or SIGINT."""
    models = ModelSet.load(config, where=where)
    metrics = Metrics.from_config(config, version=VERSION)
    ledger = await open_ledger(config)
    decisions: DecisionLog = (
        StreamLog(
            config.ledger.url, config.ledger.pool, config.telemetry.decision_log, on_drop=metrics.decision_log_dropped
        )
        if isinstance(ledger, RedisLedger)
        else RingLog(config.telemetry.decision_log)
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log.info("starting", extra={"pid": os.getpid(), "listen": listen, "admin": admin})
    await Runtime(config, models, watched(ledger, metrics), decisions, metrics).run(listen, admin, ready, stop)
