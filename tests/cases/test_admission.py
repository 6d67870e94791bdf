"""Public bug reports of kinds a and b: requests that would have cost an engine its life, decided by the real runtime."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.ledger.inmemory import InMemoryLedger
from extproc.server import render
from extproc.types import RequestHead
from tests.cases.sidecar import Sidecar, chat, device, fleet, llamacpp, report, tokens

PAYLOADS = Path(__file__).parents[1] / "data" / "payloads"
#: A picture of 1,000 x 800 pixels whose size is not known to anybody but its server.
PICTURE = {"type": "image_url", "image_url": {"url": "https://pictures.example.test/1.png"}}

Make = Callable[..., Sidecar]


@pytest.fixture
def make() -> Iterator[Make]:
    """Sidecars that are closed in the end; a second one shares the first one's ledger if it is given."""
    made: list[Sidecar] = []

    def one(text: str, **more: Any) -> Sidecar:
        made.append(Sidecar(text, **more))
        return made[-1]

    yield one
    for sidecar in made:
        sidecar.close()


async def test_a04_a_burst_with_pictures_at_two_sidecars_gets_one_lanes_places(make: Make) -> None:
    """72 pictures at once, lane of 16: 16 in flight in total, the others are told different times to come back."""
    first = make(fleet(lane="{concurrency: 16}"))
    second = make(fleet(lane="{concurrency: 16}"), ledger=first.ledger)
    for sidecar in (first, second):
        await sidecar.see(report(tokens=900_000, max_sequences=256))
    content = [PICTURE, {"type": "text", "text": "Describe."}]
    asked = chat("", messages=[{"role": "user", "content": content}], max_tokens=200)
    decisions = await asyncio.gather(*((first, second)[n % 2].decide(asked) for n in range(72)))
    assert Counter(decision.outcome for decision in decisions) == {"admit": 16, "reject:lane_full": 56}
    waits = {decision.refusal.retry_after_ms for decision in decisions if decision.refusal is not None}
    assert len(waits) > 40
    without = await first.decide(chat("Describe.", max_tokens=200))
    assert all((decision.input_tokens or 0) > (without.input_tokens or 0) + 1000 for decision in decisions)


async def test_a05_prompts_that_are_not_prefilled_yet_are_bounded_although_their_kv_fits(make: Make) -> None:
    """128 prompts of 2,048 tokens fit a pool of 900,000; the engine gets what it prefills within the TTFT budget."""
    seen = report(tokens=900_000)
    # The ledger's clock stands still: nothing is prefilled while they come, however long that takes.
    ledger = InMemoryLedger(lambda: seen.scrape_end_at_s, periodic_s=1.0)
    sidecar = make(
        fleet(target="{ttftBudgetMs: 2000, prefillTokensPerS: {floor: 8000, coldStart: 8000}}"), ledger=ledger
    )
    await sidecar.see(seen)
    decisions = [await sidecar.decide(tokens(2048, max_tokens=128)) for _ in range(128)]
    found = Counter(decision.outcome for decision in decisions)
    assert set(found) == {"admit", "reject:prefill_busy"}
    assert 7 <= found["admit"] <= 9
    assert all(decision.refusal.retry_after_ms for decision in decisions if decision.refusal is not None)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_a09_a_request_must_fit_alone_at_its_full_cap(make: Make, engine: str) -> None:
    """120,000 + 16,384 > 130,000 is refused for good, however much less such answers took so far."""
    sidecar = make(fleet(engine))
    await sidecar.see(report(tokens=130_000, engine=engine))
    asked = tokens(120_000, max_tokens=16_384)
    for _ in range(200):
        sidecar.runtime.learning.observe_output(("edit", "primary", "text_completion:-:-:long"), 100)
    decision = await sidecar.decide(asked)
    assert (decision.reason, decision.refusal and decision.refusal.status) == ("exceeds_pool", 400)
    assert (await sidecar.decide(tokens(100_000, max_tokens=16_384))).outcome == "admit"


async def test_a09_where_an_overflow_is_fatal_the_cap_is_written_down_to_the_room(make: Make) -> None:
    """llama.cpp gets a cap that it cannot outgrow, and all of it is reserved."""
    sidecar = make(fleet("llamacpp"))
    await sidecar.see(llamacpp(tokens=130_000))
    decision = await sidecar.decide(tokens(120_000, max_tokens=16_384))
    (taken,) = decision.candidates
    assert decision.body is not None
    assert b'"max_tokens": 7400' in decision.body
    assert taken.need is not None
    assert taken.need.kv_blocks == 127_400 == int(130_000 * 0.98)


@pytest.mark.parametrize(
    ("pool", "size", "fitting"),
    [(1024, (300, 100), 2), (16_384, (3000, 2000), 3)],
    ids=["a12 four slots of 1024 are one pool", "a13 four chats of 5000"],
)
async def test_a_unified_cache_is_one_pool_for_all_slots(
    make: Make, pool: int, size: tuple[int, int], fitting: int
) -> None:
    """Four sidecars race; what would overflow the shared cells, and kill all, is refused and may come back."""
    sidecars = [make(fleet("llamacpp"))]
    sidecars += [make(fleet("llamacpp"), ledger=sidecars[0].ledger) for _ in range(3)]
    for sidecar in sidecars:
        await sidecar.see(llamacpp(tokens=pool, max_sequences=4, max_model_tokens=pool))
    prompt, cap = size
    decisions = await asyncio.gather(*(sidecar.decide(tokens(prompt, max_tokens=cap)) for sidecar in sidecars))
    assert Counter(d.outcome for d in decisions) == {"admit": fitting, "reject:insufficient_headroom": 4 - fitting}


@pytest.mark.parametrize(
    ("engine", "per_request", "prompt"), [("llamacpp", 27_306, 30_000), ("ollama", 5000, 6000)], ids=["a15", "b05"]
)
async def test_the_limit_of_a_request_is_what_the_server_gives_one_slot(
    make: Make, engine: str, per_request: int, prompt: int
) -> None:
    """Not --ctx-size, not the trained context: it is rerouted, and refused for good where there is nowhere to go."""
    for lane, outcome in (("{}", "reject:exceeds_context"), ("{fallback: far}", "fallback:far")):
        sidecar = make(fleet(engine, lane=lane))
        await sidecar.see(
            llamacpp(tokens=163_840, engine=engine, max_model_tokens=per_request), devices=[device(20_000)]
        )
        assert (await sidecar.decide(tokens(prompt))).outcome == outcome
        assert (await sidecar.decide(tokens(per_request - 100))).outcome == "admit"


async def test_a17_a_lanes_budget_comes_before_any_headroom(make: Make) -> None:
    """15,000 tokens never enter an interactive lane of 4,096, however free the engine is."""
    sidecar = make(fleet(lane="{maxInputTokens: 4096}"))
    await sidecar.see(report(tokens=900_000))
    decision = await sidecar.decide(tokens(15_000))
    assert (decision.outcome, decision.refusal and decision.refusal.status) == ("reject:prompt_budget_exceeded", 400)
    said = decision.refusal.message if decision.refusal else ""
    assert "edit" in said
    told = render(decision, "request_body", RequestHead("POST", "/v1/chat/completions", {})).immediate_response.body
    assert ("at most" in said.partition(", the lane")[0]) is (decision.count_source == "bound")
    assert (b"resulted in" in told) is (decision.count_source != "bound")
    assert (await sidecar.decide(tokens(4096))).outcome == "admit"
    assert (await sidecar.decide(tokens(4097))).outcome == "reject:prompt_budget_exceeded"


@pytest.mark.parametrize(
    ("asked", "lane", "code"),
    [
        ({"prompt_logprobs": -1}, "{}", "prompt_logprobs_not_allowed"),
        ({"prompt_logprobs": 5000}, "{}", "prompt_logprobs_not_allowed"),
        ({"prompt_logprobs": -1}, "{promptLogprobs: allow}", None),
        ({"prompt_logprobs": 20}, "{}", None),
        ({"logprobs": True, "top_logprobs": 20}, "{}", None),
    ],
    ids=str,
)
async def test_a20_logits_of_the_whole_prompt_need_the_lanes_consent(
    make: Make, asked: dict[str, Any], lane: str, code: str | None
) -> None:
    """prompt x vocabulary x 8 bytes of host memory are refused as the client's mistake; what is bounded passes."""
    sidecar = make(fleet(lane=lane))
    await sidecar.see(report())
    decision = await sidecar.decide(chat(**asked))
    assert (decision.refusal.code if decision.refusal else None) == code
    assert decision.outcome == ("admit" if code is None else "reject:bad_request")
    assert len(await sidecar.reserved()) == (code is None)


async def test_a20_the_reported_body_is_refused(make: Make) -> None:
    """The body of the report, with status 400 and the field at fault."""
    sidecar = make(fleet(more="defaultLane: edit\n"))
    await sidecar.see(report())
    body = (PAYLOADS / "36-chat-prompt-logprobs-all.json").read_bytes()
    decision = await sidecar.decide(("/v1/chat/completions", body))
    assert decision.refusal is not None
    assert (decision.refusal.status, decision.refusal.param) == (400, "prompt_logprobs")


@pytest.mark.parametrize(
    ("engine", "free_mb", "outcome"),
    [
        ("ollama", 900, "reject:insufficient_headroom"),
        ("ollama", 2000, "admit"),
        ("vllm", 200, "reject:insufficient_headroom"),
        ("vllm", 900, "admit"),
        ("vllm", None, "admit"),
        ("ollama", None, "reject:unknown_state"),
    ],
)
async def test_a21_room_in_the_pool_does_not_outweigh_a_full_card(
    make: Make, engine: str, free_mb: int | None, outcome: str
) -> None:
    """minFreeVramMb where requests allocate, devices.guardMb where the pool is allocated at start (b16: whoever fills it).

    Where no driver tells what is free, only who needs that memory is closed.
    """
    model = "models: {m: {kvBytesPerToken: 1000}}\n"
    sidecar = make(fleet(engine, lane="{minFreeVramMb: 1024}", target="{model: m}", more=model))
    state = "unknown" if free_mb is None else "ok"
    await sidecar.see(report(engine=engine, used_blocks=1250), devices=[device(free_mb, state=state)])
    assert (await sidecar.decide(tokens(100))).outcome == outcome


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
async def test_a22_a_cap_of_zero_is_zero(make: Make, engine: str) -> None:
    """Scoring with echo reserves its prompts and nothing more, and the body goes on as it is."""
    sidecar = make(fleet(engine, more="defaultLane: edit\n"))
    await sidecar.see(report(block=1, engine=engine))
    decision = await sidecar.decide(("/v1/completions", (PAYLOADS / "52-cmpl-echo-scoring.json").read_bytes()))
    taken = decision.candidates[0]
    assert (decision.outcome, decision.expected_output_tokens, decision.body) == ("admit", 0, None)
    assert taken.need is not None
    assert (taken.need.kv_blocks, taken.need.sequences) == (650, 2)


@pytest.mark.parametrize(
    ("asked", "prompt", "free_mb", "outcome"),
    [
        (None, 6000, 20_000, "admit"),
        (2048, 6000, 20_000, "reject:exceeds_context"),
        (32_768, 6000, 20_000, "reject:insufficient_headroom"),
        (32_768, 6000, 40_000, "admit"),
    ],
)
async def test_b05_a_context_that_the_request_asks_ollama_for(
    make: Make, asked: int | None, prompt: int, free_mb: int, outcome: str
) -> None:
    """A smaller one cuts the prompt silently, so it is the limit; a larger one is allocated anew as a whole."""
    sidecar = make(fleet("ollama", target="{model: m}", more="models: {m: {kvBytesPerToken: 1000000}}\n"))
    await sidecar.see(llamacpp(tokens=8192, engine="ollama", max_model_tokens=8192), devices=[device(free_mb)])
    options = {"num_predict": 100} | ({} if asked is None else {"num_ctx": asked})
    path, body = "/api/generate", chat("", prompt="x" * (prompt - 200), raw=True, options=options)[1]
    assert (await sidecar.decide((path, body))).outcome == outcome


@pytest.mark.parametrize(
    ("asked", "outcome"),
    [(("/v1/embeddings", b'{"model":"coder","input":["abc","def"]}'), "admit"), (tokens(10), "reject:unknown_state")],
    ids=["embeddings", "generation"],
)
async def test_b07_an_encoder_keeps_no_kv(make: Make, asked: tuple[str, bytes], outcome: str) -> None:
    """A pool of the null block alone takes what generates nothing; for the rest its size is unknown, as while it loads."""
    sidecar = make(fleet())
    await sidecar.see(report(tokens=0))
    decision = await sidecar.decide(asked)
    assert decision.outcome == outcome
    if outcome == "admit":
        need = decision.candidates[0].need
        assert need is not None
        assert (need.kv_blocks, need.sequences, need.prefill_tokens > 0) == (0, 2, True)


async def test_b15_a_measured_cost_decides_and_is_shown(make: Make) -> None:
    """kvBytesPerToken is what the figures of the decision are made of."""
    sidecar = make(fleet(target="{model: m}", more="models: {m: {kvBytesPerToken: 1000}}\n"))
    await sidecar.see(report())
    (taken,) = (await sidecar.decide(tokens(160, max_tokens=160))).candidates
    assert taken.need is not None
    assert (taken.need.kv_blocks, taken.need.kv_bytes) == (20, 320_000)


async def test_b16_a_shortage_is_decided_once_for_all_candidates(make: Make) -> None:
    """A full card refuses every replica on it in the same call, and the request goes elsewhere at once."""
    two = ", ".join(f"{{name: gpu-{n}, url: 'http://127.0.0.1:{n + 1}', devices: [GPU-0]}}" for n in range(2))
    sidecar = make(fleet(lane="{fallback: far}", target=f"{{replicas: [{two}]}}"))
    await sidecar.see(report(), report("gpu-1"), devices=[device(100)])
    decision = await sidecar.decide(tokens(100))
    assert (decision.outcome, decision.plan) == ("fallback:far", ("far",))
    assert [candidate.refused_by for candidate in decision.candidates] == ["insufficient_headroom"] * 2 + [None]


async def test_j16_a_prefix_hit_saves_prefill_and_no_kv(make: Make) -> None:
    """Half of the prompt is cached: half of the prefill is charged, and every block."""
    needs = []
    for share in (None, 0.5):
        sidecar = make(fleet())
        await sidecar.see(report(prefix_hit_share=share))
        needs.append((await sidecar.decide(tokens(1600))).candidates[0].need)
    full, half = needs
    assert full is not None
    assert half is not None
    assert (half.prefill_tokens, half.kv_blocks) == (full.prefill_tokens // 2, full.kv_blocks)


async def test_j15_a_cap_is_a_ceiling_and_no_forecast(make: Make) -> None:
    """Caps of 1,024 and answers of 13: once that is known, 72 at once fit where 16 did at the cap."""
    admitted = []
    for learned in (0, 100):
        sidecar = make(fleet(lane="{maxOutputTokens: 1024}"))
        await sidecar.see(report(tokens=20_480))
        for _ in range(learned):
            sidecar.runtime.learning.observe_output(("edit", "primary", "text_completion:-:-:le2048"), 13)
        decisions = await asyncio.gather(*(sidecar.decide(tokens(160, max_tokens=1024)) for _ in range(72)))
        admitted.append(sum(decision.outcome == "admit" for decision in decisions))
    assert admitted == [16, 72]


async def test_j04_agents_of_every_size_share_one_pool(make: Make) -> None:
    """First turns of 500 to 22,000 tokens side by side: the pool is never promised twice, and small ones fit beside large."""
    sidecar = make(fleet())
    await sidecar.see(report(tokens=200_000))
    sizes = [500, 15_000, 20_000, 22_000, 20_500] * 20
    decisions = [await sidecar.decide(tokens(size, max_tokens=1000)) for size in sizes]
    view = (await sidecar.ledger.snapshot()).replicas["gpu-0"]
    assert view.reserved_blocks <= 200_000 // 16 * 0.98
    admitted = Counter(size for size, decision in zip(sizes, decisions, strict=True) if decision.outcome == "admit")
    assert set(admitted) == set(sizes)
    assert {decision.outcome for decision in decisions} == {"admit", "reject:insufficient_headroom"}
    first_refused = [decision.outcome for decision in decisions].index("reject:insufficient_headroom")
    assert any(decision.outcome == "admit" for decision in decisions[first_refused:])
