"""Capacity plan rows: what fits, what binds, what would help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from extproc.errors import UsageError
from extproc.memory import KvModel, build_kv_model, engine_rules, load_geometry
from extproc.memory.caches import GIB
from extproc.memory.overheads import DeviceBudget
from extproc.memory.planner import PlanRequest, PlanRow, ReplicaRoom, plan_row, replica_row
from extproc.memory.sizes import parse_devices, parse_size
from extproc.memory.weights import weight_format


def request(
    model: str, form: str, context: int, card_gib: float = 24, count: int = 1, engine: str = "vllm"
) -> PlanRequest:
    """A question about identical cards."""
    weights = weight_format(form)
    devices = (DeviceBudget(int(card_gib * GIB)),) * count
    return PlanRequest(load_geometry(model), engine_rules(engine), weights.name, context, devices, form=weights)


def test_sequences_fill_the_pool() -> None:
    """As many sequences as blocks allow; one more would not fit; the safe figure is 70 % of the pool."""
    row = plan_row(request("Qwen2.5-7B", "awq", 8192))
    assert (row.fits, row.binding_term) == (True, "kv")
    assert 0 <= row.headroom_bytes < row.kv_bytes_per_sequence
    exact = (row.max_sequences * row.kv_bytes_per_sequence + row.headroom_bytes) / row.kv_bytes_per_sequence
    assert row.safe_sequences_70 == int(0.7 * exact)


def test_a_mean_below_the_context_allows_more_in_flight() -> None:
    """Safe concurrency is for the mean of the traffic."""
    full = plan_row(request("Qwen2.5-7B", "awq", 32768))
    mean = plan_row(replace(request("Qwen2.5-7B", "awq", 32768), mean_tokens=4096))
    assert mean.safe_sequences_70 > full.safe_sequences_70
    assert mean.max_sequences == full.max_sequences


def test_weights_bind_and_a_smaller_format_would_fit() -> None:
    """Why it does not fit and what would."""
    row = plan_row(request("Qwen2.5-14B", "bf16", 8192))
    assert (row.fits, row.binding_term, row.max_sequences) == (False, "weights", 0)
    assert row.headroom_bytes < 0
    assert row.why.startswith("weights take 27.5 GiB of 22.1 GiB usable")
    assert row.would == ("weights in fp8", "2 such devices")


def test_kv_binds_and_a_shorter_context_would_fit() -> None:
    """The sequence itself is too large."""
    row = plan_row(request("Qwen2.5-14B", "fp8", 32768))
    assert (row.fits, row.binding_term) == (False, "kv")
    assert "context of 16384 tokens" in row.would


def test_overheads_bind_where_weights_just_fit() -> None:
    """Weights alone would fit, what the engine takes beside them does not."""
    row = plan_row(request("Qwen3-8B", "bf16", 2048, card_gib=17))
    assert (row.fits, row.binding_term) == (False, "overhead")


def test_every_way_out_really_fits() -> None:
    """A suggestion that is followed gives a row that fits."""
    asked = request("Qwen2.5-Coder-32B", "awq", 8192)
    row = plan_row(asked)
    followed = {
        "context of 2048 tokens": replace(asked, context_tokens=2048),
        "2 such devices": replace(asked, devices=asked.devices * 2),
    }
    assert set(row.would) == set(followed)
    assert all(plan_row(r).fits for r in followed.values())


def test_beyond_the_models_context_is_unsupported() -> None:
    """A context the model was not made for is not a question of memory."""
    row = plan_row(request("CodeLlama-7b", "bf16", 131072, card_gib=80))
    assert (row.fits, row.binding_term) == (False, "unsupported")


def test_two_cards_share_a_model() -> None:
    """70B in fp8 needs two cards of 80 GB, with room for long contexts."""
    one, two = (plan_row(request("Llama-3.3-70B-Instruct", "fp8", 32768, 80, n)) for n in (1, 2))
    assert (one.fits, two.fits, two.devices) == (False, True, 2)


def test_llamacpp_allocates_slots_and_a_growing_buffer() -> None:
    """Every further slot costs its cache and its part of the compute buffer."""
    row = plan_row(request("Qwen3-8B", "q4_k_m", 8192, engine="llamacpp"))
    per_slot = row.kv_bytes_per_sequence + 6 * 512 * 8192
    assert row.fits
    assert 0 <= row.headroom_bytes < per_slot


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "ollama", "trtllm", "tgi"])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "Qwen3.5-35B-A3B", "DeepSeek-V2-Lite", "gemma-3-27b"])
def test_more_memory_never_means_less(engine: str, model: str) -> None:
    """Sequences grow with the card, on every engine and kind of cache."""
    rows = [
        plan_row(request(model, "q8_0" if engine in ("llamacpp", "ollama") else "fp8", 8192, card, 1, engine))
        for card in (24, 48, 80, 141)
    ]
    counts = [r.max_sequences for r in rows]
    assert counts == sorted(counts)
    assert counts[-1] > 0
    assert all(r.safe_sequences_70 <= r.max_sequences for r in rows)


def test_sglang_states_cap_the_running_requests() -> None:
    """The state pool has r / (1 + r) of what remains; short contexts are bound by it, long ones by KV."""
    short, long = (plan_row(request("Qwen3.5-35B-A3B", "fp8", n, 80, 1, "sglang")) for n in (2048, 131072))
    states = build_kv_model(load_geometry("Qwen3.5-35B-A3B"), engine_rules("sglang")).state_bytes_per_sequence
    rest = short.headroom_bytes + short.max_sequences * short.kv_bytes_per_sequence
    assert short.max_sequences == int(rest * 0.9 / 1.9 // states)
    assert 0 < long.max_sequences < short.max_sequences


def test_sglang_pools_of_a_fixed_ratio_are_bound_by_the_tighter() -> None:
    """At long contexts the sliding pool stands half empty: fewer sequences than the bytes alone would allow."""
    row = plan_row(request("gpt-oss-20b", "mxfp4", 65536, 80, 1, "sglang"))
    assert (
        row.max_sequences
        < (row.headroom_bytes + row.max_sequences * row.kv_bytes_per_sequence) // row.kv_bytes_per_sequence
    )


def test_graphs_come_on_top_of_older_engines_share() -> None:
    """Before 0.20 the pool did not pay for CUDA graphs, so it was larger by them on a card with room."""
    old, new = (
        plan_row(replace(request("Qwen3-8B", "bf16", 8192, 80), rules=engine_rules("vllm", v)))
        for v in ("0.19", "0.20")
    )
    graphs = 20 * 2**20 * 36
    assert old.overhead_bytes == new.overhead_bytes - graphs
    assert old.max_sequences >= new.max_sequences


# --- a running replica -------------------------------------------------------------------------------------


def room(committed: int | None, capacity: int | None = 4096, slots: int | None = 256, sequences: int = 7) -> PlanRow:
    """A row of a replica with this pool."""
    kv = build_kv_model(load_geometry("Qwen2.5-Coder-32B"), engine_rules("vllm"))
    return replica_row(
        "primary", "awq", "vllm", 8192, kv, ReplicaRoom(capacity, committed, slots, sequences), 19_300_000_000
    )


def test_free_blocks_of_a_running_replica() -> None:
    """What is committed is not offered again."""
    row = room(1200)
    assert (row.fits, row.max_sequences, row.binding_term) == (True, (4096 - 1200) // 512, "kv")
    assert row.headroom_bytes == (4096 - 1200) * 16 * 262_144


def test_slots_bind_where_they_run_out_first() -> None:
    """The engine's own limit of sequences is a resource too."""
    row = room(0, slots=8, sequences=7)
    assert (row.max_sequences, row.binding_term) == (1, "sequences")
    assert room(0, slots=7).why == "all 7 sequences of the engine are taken"


def test_a_full_replica_says_what_would_fit() -> None:
    """The longest sequence for the blocks that are left."""
    row = room(4000)
    assert (row.fits, row.would) == (False, ("a context of 1536 tokens",))


def test_an_unknown_pool_is_unknown_not_empty() -> None:
    """No report, no promise."""
    assert {room(None).binding_term, room(0, capacity=None).binding_term} == {"unknown"}


def test_a_sequence_larger_than_the_pool_is_named() -> None:
    """It would never fit, however empty the replica is."""
    assert (
        room(0, capacity=100).why
        == "a sequence of 8192 tokens needs 512 blocks, the pool without its watermark has 100"
    )


def test_blocks_without_a_geometry() -> None:
    """A replica of an unknown model still has a row, in blocks."""
    kv = KvModel.tokens_only(16)
    row = replica_row("p", "-", "vllm", 1600, kv, ReplicaRoom(1000, 0, None, 0), 0)
    assert (row.max_sequences, row.kv_bytes_per_sequence) == (10, 0)


# --- sizes as people write them ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GiB", (24 * GIB,)), ("80GB", (80 * 10**9,)), ("80GiBx2", (80 * GIB,) * 2), ("2x80GiB", (80 * GIB,) * 2),
     ("1.5 TiB", (3 * 512 * GIB,)), ("25769803776B", (24 * GIB,)), ("24gib x 4", (24 * GIB,) * 4), ("24G", (24 * GIB,))],
)  # fmt: skip
def test_devices_are_understood(text: str, expected: tuple[int, ...]) -> None:
    """Sizes with units and counts."""
    assert parse_devices(text) == expected


@pytest.mark.parametrize(
    "text", ["", "much", "24XiB", "24GiBx0", "24GiBx9999", "-5GiB", "0", "GiB", "24GiBxx2", "24", "24x2", "2x24"]
)
def test_other_sizes_are_refused_with_an_example(text: str) -> None:
    """The error shows how to write it."""
    with pytest.raises(UsageError, match=r"24GiB|more than 0"):
        parse_devices(text)


def test_a_single_size() -> None:
    """parse_size takes no count."""
    assert parse_size("512MiB") == 512 * 2**20
