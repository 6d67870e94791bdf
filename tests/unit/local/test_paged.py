"""The emulated engine's memory model, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from extproc.local.paged import Engine, EngineShape, Generation, Phase

#: The pool and rates of real vLLM 0.32 on two CPU cores with a tiny model: 512 blocks of 32 tokens.
VLLM_CPU = EngineShape(
    blocks=512,
    block_tokens=32,
    max_sequences=64,
    max_model_tokens=8192,
    step_base_s=0.003,
    prefill_tokens_per_s=20_000,
    decode_tokens_per_s=7_000,
)
#: llama-server with -c 8192 -np 16 --kv-unified.
LLAMACPP = EngineShape(
    blocks=8192, block_tokens=1, max_sequences=16, max_model_tokens=8192, overflow="fatal", null_block=False
)
SMALL = EngineShape(
    blocks=11,
    block_tokens=4,
    max_sequences=8,
    max_model_tokens=40,
    step_base_s=1,
    prefill_tokens_per_s=1e9,
    decode_tokens_per_s=1e9,
)


def drive(
    shape: EngineShape, sizes: list[tuple[int, int]], budget: int | None = None
) -> tuple[Engine, list[Generation], float]:
    """Run all requests at once, or, with a budget, only while the sum of in + out inside stays under it."""
    engine, now_s = Engine(shape), 0.0
    todo = [Generation(str(at), given, made) for at, (given, made) in enumerate(sizes)]
    everything, inside = list(todo), []
    while todo or engine.busy:
        while todo and (budget is None or sum(g.input_tokens + g.output_tokens for g in [*inside, todo[0]]) <= budget):
            inside.append(todo.pop(0))
            engine.submit(inside[-1], now_s)
        step = engine.plan(now_s)
        assert engine.pool.used <= shape.usable_blocks
        assert step.tokens <= shape.step_tokens
        now_s += step.duration_s
        engine.complete(step, now_s)
        inside = [g for g in inside if g.phase in (Phase.WAITING, Phase.RUNNING)]
    return engine, everything, now_s


def test_preemptions_are_those_of_real_vllm_on_long_prompts() -> None:
    """24 x (3000 in + 1000 out) at once: real vLLM preempted 7 times, ran 3 to 5 at once and took 23 to 31 s."""
    engine, requests, took_s = drive(VLLM_CPU, [(3000, 1000)] * 24)

    assert all(request.phase is Phase.FINISHED for request in requests)
    assert engine.tally.preemptions == 7
    assert 23 <= took_s <= 31
    assert max(r.first_token_s - r.submitted_s for r in requests if r.first_token_s) == pytest.approx(26.8, rel=0.3)


def test_preemptions_are_those_of_real_vllm_on_long_answers() -> None:
    """24 x (1000 in + 2500 out) at once: real vLLM preempted 34 times; with 16,000 tokens let in at most, never."""
    crowded, _, crowded_s = drive(VLLM_CPU, [(1000, 2500)] * 24)
    gated, requests, gated_s = drive(VLLM_CPU, [(1000, 2500)] * 24, budget=16_000)

    assert crowded.tally.preemptions == 34
    assert gated.tally.preemptions == 0
    assert crowded_s < gated_s  # as measured: 53 s against 64 s
    assert max(r.ended_s - r.submitted_s for r in requests if r.ended_s) == pytest.approx(11.9, rel=0.3)


@pytest.mark.parametrize(
    ("sizes", "budget", "dead"),
    [
        ([(600, 200)] * 24, None, 16),
        ([(600, 200)] * 24, 8192, 0),
        ([(1500, 1000)] * 16, None, 16),
        ([(1500, 1000)] * 16, 8192, 0),
    ],
)
def test_a_full_unified_cache_kills_as_many_as_real_llamacpp(
    sizes: list[tuple[int, int]], budget: int | None, dead: int
) -> None:
    """The counts of dead requests measured on llama-server b10434, without and with a budget in front."""
    engine, requests, _ = drive(LLAMACPP, sizes, budget)

    assert sum(request.phase is Phase.FAILED for request in requests) == dead
    assert engine.pool.used == 0
    assert engine.tally.over_capacity_events == (1 if dead else 0)


def test_the_null_block_is_never_given_out() -> None:
    """Eleven blocks with a null block hold ten blocks of tokens and not one more."""
    engine, _, _ = drive(SMALL, [(8, 8)] * 6)

    assert engine.pool.peak_used == 10


def test_the_newest_request_is_preempted_and_recomputed_first() -> None:
    """When the pool is full the last admitted gives way, keeps its output and is first in the queue."""
    engine = Engine(SMALL)
    old, new, waiting = (Generation(name, 16, 20) for name in ("old", "new", "waiting"))
    for generation in (old, new, waiting):
        engine.submit(generation, 0.0)
    while not engine.tally.preemptions:
        engine.complete(engine.plan(0.0), 0.0)

    assert (old.phase, new.phase) == (Phase.RUNNING, Phase.WAITING)
    assert list(engine.waiting) == [new, waiting]
    assert new.generated > 0
    assert new.computed == 0
    assert new.held_blocks == 0


def test_a_prompt_is_computed_in_chunks_beside_running_decodes() -> None:
    """A step computes one token of the running request and what is left of the budget of the long prompt."""
    shape = replace(SMALL, step_tokens=8)
    engine = Engine(shape)
    engine.submit(Generation("running", 2, 10), 0.0)
    engine.complete(engine.plan(0.0), 0.0)
    engine.submit(Generation("long", 20, 1), 0.0)

    steps = [engine.plan(0.0)]
    engine.complete(steps[0], 0.0)
    steps.append(engine.plan(0.0))

    assert [[new for _, new in step.work] for step in steps] == [[1, 7], [1, 7]]


def test_a_step_lasts_by_its_prefill_and_its_decodes() -> None:
    """Duration = base + prefill tokens / prefill rate + decodes / decode rate."""
    shape = replace(SMALL, step_base_s=0.5, prefill_tokens_per_s=10, decode_tokens_per_s=4)
    engine = Engine(shape)
    engine.submit(Generation("a", 10, 3), 0.0)

    first = engine.plan(0.0)
    engine.complete(first, 0.0)
    second = engine.plan(0.0)

    assert first.duration_s == pytest.approx(0.5 + 10 / 10)
    assert second.duration_s == pytest.approx(0.5 + 1 / 4)


def test_an_abort_frees_its_blocks_at_the_next_step() -> None:
    """A gone client's blocks are held while its step runs and are free when the next one is planned."""
    engine = Engine(SMALL)
    gone, waiting = Generation("gone", 36, 4), Generation("waiting", 36, 4)
    engine.submit(gone, 0.0)
    engine.submit(waiting, 0.0)
    step = engine.plan(0.0)

    assert engine.abort(gone, 0.5)
    assert engine.pool.used == 9
    engine.complete(step, 1.0)
    engine.plan(1.0)

    assert gone.generated == 0
    assert waiting.phase is Phase.RUNNING
    assert not engine.abort(gone, 2.0)


def test_samples_of_one_prompt_share_its_full_blocks() -> None:
    """Two samples of a 10-token prompt hold its two full blocks once and a partial block each."""
    engine = Engine(SMALL)
    for shared in (0, 2):
        engine.submit(Generation("n2", 10, 4, prompt_keys=("a", "b"), shared_blocks=shared), 0.0)
    engine.plan(0.0)

    assert engine.pool.used == 4
    assert engine.tally.peak_demand_blocks == 4


def test_a_remembered_prefix_is_not_computed_again_and_counts_as_free() -> None:
    """With a prefix cache the second equal prompt computes its last token only; idle prefixes hold no capacity."""
    engine = Engine(replace(SMALL, prefix_cache=True))
    first, second = (Generation(name, 8, 1, prompt_keys=("a", "b")) for name in ("first", "second"))
    engine.submit(first, 0.0)
    engine.complete(engine.plan(0.0), 0.0)
    idle = engine.pool.used
    engine.submit(second, 0.0)
    step = engine.plan(0.0)

    assert idle == 0
    assert [new for _, new in step.work] == [1]
    assert second.cached == 7


def test_remembered_prefixes_give_way_to_requests() -> None:
    """A pool full of idle prefixes still holds a request as large as the pool."""
    engine = Engine(replace(SMALL, prefix_cache=True))
    for at in range(5):
        engine.submit(Generation(str(at), 8, 1, prompt_keys=((at, 0), (at, 1))), 0.0)
        engine.complete(engine.plan(0.0), 0.0)
    large = Generation("large", 39, 2)
    engine.submit(large, 0.0)
    while engine.busy:
        engine.complete(engine.plan(0.0), 0.0)

    assert large.phase is Phase.FINISHED
    assert large.preemptions == 0


@pytest.mark.parametrize(
    "field",
    [
        {"blocks": 0},
        {"step_tokens": 0},
        {"decode_tokens_per_s": 0},
        {"step_base_s": -1},
        {"overflow": "ignore"},
        {"max_model_tokens": 9000},
    ],
)
def test_a_shape_no_engine_would_start_with_is_refused(field: dict[str, int]) -> None:
    """The message names the field at fault."""
    with pytest.raises(ValueError, match=next(iter(field))):
        EngineShape(**field)  # type: ignore[arg-type]
