"""The emulated engine's memory under random requests, samples and aborts: it never over-commits and ends empty."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.local.paged import Engine, EngineShape, Generation, Phase

ENDS = (Phase.FINISHED, Phase.ABORTED, Phase.FAILED)
#: A request: input, output, how alike its prompt is to others' (0: like all), samples.
REQUESTS = st.tuples(st.integers(1, 40), st.integers(0, 20), st.integers(0, 3), st.integers(1, 3))
ACTIONS = st.lists(st.one_of(REQUESTS, st.integers(0, 30), st.none()), max_size=40)


@given(ACTIONS, st.sampled_from(["preempt", "fatal"]), st.booleans(), st.integers(1, 16))
@settings(max_examples=300)
def test_it_never_holds_more_than_it_has_and_ends_empty(
    actions: list[tuple[int, int, int, int] | int | None], overflow: str, prefix_cache: bool, step_tokens: int
) -> None:
    """None is a step, a number aborts that request, a tuple submits one; afterwards the engine runs dry."""
    shape = EngineShape(
        blocks=20, block_tokens=4, max_sequences=5, max_model_tokens=70, step_tokens=step_tokens, overflow=overflow,
        prefix_cache=prefix_cache, null_block=overflow == "preempt",
    )  # fmt: skip
    engine, everything = Engine(shape), []
    for now, action in enumerate(actions):
        if isinstance(action, tuple):
            given_tokens, made, likeness, samples = action
            names = tuple((likeness, block) for block in range(given_tokens // 4))
            for sample in range(samples):
                generation = Generation("r", given_tokens, made, names, shared_blocks=len(names) if sample else 0)
                everything.append(generation)
                engine.submit(generation, now)
        elif isinstance(action, int):
            if action < len(everything):
                engine.abort(everything[action], now)
        else:
            engine.complete(engine.plan(now), now)
        assert 0 <= engine.pool.used <= shape.usable_blocks
    for now in range(20_000):
        if not engine.busy:
            break
        engine.complete(engine.plan(now), now)
        assert engine.pool.used <= shape.usable_blocks
    engine.plan(0.0)

    assert all(generation.phase in ENDS for generation in everything)
    assert all(generation.held_blocks == 0 for generation in everything)
    assert engine.pool.used == 0
    assert engine._demand == engine._final == 0
    finished = [generation for generation in everything if generation.phase is Phase.FINISHED]
    assert all(generation.generated == generation.output_tokens for generation in finished)
    assert engine.tally.submitted == engine.tally.finished + engine.tally.aborted + engine.tally.failed
