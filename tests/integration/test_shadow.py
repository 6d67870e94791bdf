"""Shadow mode on the service as it is: requests go on whatever was decided, and are told where there is nowhere to go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cases.sidecar import Sidecar, body, chat, fleet, head, report

FOUND = """
targets: {primary: {engine: vllm, replicas: [{name: gpu, url: "http://engines.test:1", discover: dns}]}}
lanes: {edit: {}}
aliases: {coder: {lane: edit, targets: [primary]}}
ledger: {url: memory}
mode: shadow
"""


@pytest.fixture
def small() -> Iterator[Sidecar]:
    """One replica, in shadow mode."""
    sidecar = Sidecar(fleet(more="mode: shadow\n"))
    yield sidecar
    sidecar.close()


async def test_what_would_be_refused_is_served_and_reserved(small: Sidecar) -> None:
    """A request for which there is no room goes to the primary, and the ledger holds what it takes there."""
    await small.see(report(tokens=3_200))
    first, second = [(await small.answer(head(), body(chat("x" * 1_800, max_tokens=100)[1])))[-1] for _ in range(2)]
    assert (first.status, second.status) == (0, 0)
    assert second.plan == ("gpu-0",)
    assert (first.metadata["decision"], second.metadata["decision"]) == ("shadow-admit", "shadow-reject")
    assert len(await small.reserved()) == 2


async def test_what_is_not_understood_goes_on(small: Sidecar) -> None:
    """Neither a model that nobody knows nor a closed gate refuses anything."""
    await small.see(report())
    unknown = (await small.answer(head(), body(b'{"model":"nobody","messages":[]}')))[-1]
    small.runtime.gate.set(open_=False, wanted=False)
    closed = (await small.answer(head(), body(chat()[1])))[-1]
    assert [(answer.status, answer.plan) for answer in (unknown, closed)] == [(0, ("gpu-0",)), (0, ("gpu-0",))]
    assert await small.reserved() == []


async def test_without_any_replica_found_the_client_is_told() -> None:
    """There is nowhere to send it, with or without a room: 503 `not_ready`, for every way into shadow mode."""
    sidecar = Sidecar(FOUND)
    try:
        answer = (await sidecar.answer(head(), body(chat()[1])))[-1]
        sidecar.runtime.gate.set(open_=False, wanted=False)
        closed = (await sidecar.answer(head(), body(chat()[1])))[-1]
    finally:
        sidecar.close()
    assert [(a.status, a.reason) for a in (answer, closed)] == [(503, "not_ready"), (503, "not_ready")]
