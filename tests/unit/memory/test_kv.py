"""Blocks and bytes of a sequence and of a request, per engine and parallel layout."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from extproc.errors import GeometryError
from extproc.memory import (
    Flags,
    Geometry,
    KvModel,
    LayerGroup,
    LayerKind,
    StateShape,
    build_kv_model,
    engine_rules,
    geometry_from_config,
    kv_types,
    project,
    shared_prefix_tokens,
)
from extproc.memory.caches import cell_cache
from extproc.memory.geometry import spread
from extproc.memory.rows import pipeline_stages

LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = LLAMA_8B | {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
                       "qk_nope_head_dim": 128, "v_head_dim": 128, "num_attention_heads": 128, "num_key_value_heads": 128}  # fmt: skip
GPT_OSS = LLAMA_8B | {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
}
QWEN35 = LLAMA_8B | {"model_type": "qwen3_5_text", "num_hidden_layers": 64, "num_key_value_heads": 4, "head_dim": 256,
                     "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
                     "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}  # fmt: skip


def geometry(config: Mapping[str, object]) -> Geometry:
    """A parsed configuration."""
    return geometry_from_config(config, where="test")


def model(
    config: Mapping[str, object] = LLAMA_8B, engine: str = "vllm", version: str | None = None, **options: object
) -> KvModel:
    """A cost model with defaults."""
    return build_kv_model(geometry(config), engine_rules(engine, version), **options)  # type: ignore[arg-type]


# --- element sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bytes_per_token"),
    [("bf16", 131072), ("f32", 262144), ("fp8", 65536), ("fp8_e5m2", 65536), ("q8_0", 69632), ("q5_1", 49152), ("q4_0", 36864),
     ("q8_0/q4_0", 53248), ("nvfp4", 36864), ("fp8_per_token_head", 67584)],
)  # fmt: skip
def test_exact_bytes_of_every_kv_type(dtype: str, bytes_per_token: int) -> None:
    """Block types keep their exact ratio: q8_0 is 34 bytes per 32 elements, never 1 byte each."""
    assert model(kv_dtype=dtype).bytes_per_token == bytes_per_token


def test_k_and_v_may_differ() -> None:
    """A mapping gives K and V their own types."""
    assert kv_types({"k": "q8_0", "v": "f16"}).label == "q8_0/f16"


def test_an_unknown_kv_type_lists_the_known_ones() -> None:
    """The error names the value and what is known."""
    with pytest.raises(GeometryError, match=r"'q9_9' is not known; known: bf16"):
        model(kv_dtype="q9_9")


def test_quantised_weights_do_not_change_the_cache() -> None:
    """An AWQ checkpoint caches in its compute type."""
    assert model(LLAMA_8B | {"quantization_config": {"quant_method": "awq"}}).bytes_per_token == 131072


def test_sparse_latent_pages_are_packed() -> None:
    """DeepSeek V3.2 under fp8: 656 bytes plus the 132 of the indexer, per token and layer."""
    config = DEEPSEEK | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_topk": 2048}
    assert model(config, "sglang", kv_dtype="fp8").bytes_per_token == 61 * 788


# --- parallelism -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "each", "total"), [(1, 131072, 131072), (4, 32768, 131072), (8, 16384, 131072), (16, 16384, 262144)]
)
def test_heads_are_split_then_replicated(tp: int, each: int, total: int) -> None:
    """Beyond one KV head a device the cost a device stops falling and the cluster's grows."""
    kv = model(tp=tp)
    assert (kv.bytes_per_token_per_shard[0], kv.bytes_per_token) == (each, total)


def test_latent_attention_is_replicated_and_divided_by_dcp_only() -> None:
    """The latent is whole on every tensor-parallel device; decode context parallelism divides its tokens."""
    assert model(DEEPSEEK, tp=8).bytes_per_token_per_shard == (70272,) * 8
    assert model(DEEPSEEK, tp=8, dcp=8).bytes_per_token_per_shard == (8784,) * 8


def test_dcp_spreads_a_block_over_the_devices() -> None:
    """A virtual block holds 16 tokens on each device."""
    kv = model(DEEPSEEK, tp=8, dcp=8)
    assert (kv.block_tokens, kv.blocks(129)) == (128, 2)


def test_attention_data_parallelism_keeps_a_request_on_its_own_devices() -> None:
    """SGLang's dp-attention: all heads on one device, and the request lives there."""
    kv = model(LLAMA_8B, "sglang", tp=8, dp=8)
    assert (kv.shards, kv.bytes_per_token) == (1, 131072)


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"),
    [(32, 2, [16, 16]), (61, 4, [15, 15, 16, 15]), (62, 4, [15, 16, 16, 15]), (63, 4, [16, 16, 16, 15])],
)
def test_pipeline_remainder_goes_before_the_last_stage(layers: int, pp: int, sizes: list[int]) -> None:
    """Extra layers are given from the second last stage backwards."""
    assert [len(stage) for stage in pipeline_stages(layers, pp)] == sizes


def test_the_pool_is_the_minimum_over_stages() -> None:
    """The stage with most layers bounds the blocks of all."""
    kv = model(LLAMA_8B | {"num_hidden_layers": 33}, pp=2)
    assert kv.bytes_per_token_per_shard == (69632, 65536)
    assert kv.pool_blocks(69632 * 16 * 100) == 100


@pytest.mark.parametrize("options", [{"tp": 0}, {"pp": 33}, {"tp": 4, "dcp": 3}, {"block_tokens": -1}])
def test_impossible_layouts_are_refused(options: dict[str, int]) -> None:
    """A layout that no engine can run is an error, not a figure."""
    with pytest.raises(GeometryError):
        model(**options)


# --- hybrid pools ------------------------------------------------------------------------------------------


def test_delta_net_block_grows_until_the_state_fits() -> None:
    """Qwen3.5-27B: an attention block of 784 tokens in bf16, 1568 with fp8 KV, 3 state pages a sequence."""
    flags = Flags(mamba_mode="none")
    assert (model(QWEN35, flags=flags).block_tokens, model(QWEN35, kv_dtype="fp8", flags=flags).block_tokens) == (
        784,
        1568,
    )
    assert [model(QWEN35, flags=flags).blocks(n) for n in (1, 784, 785)] == [4, 4, 5]


def test_prefix_caching_keeps_one_more_state_page() -> None:
    """In align mode every state group holds two pages a sequence; it is the newest vLLM's default with prefix caching."""
    aligned, plain = model(QWEN35), model(QWEN35, flags=Flags(prefix_caching=False))
    assert (aligned.blocks(784), plain.blocks(784)) == (1 + 3 * 2, 1 + 3)


def test_speculation_takes_a_state_page_a_token_and_slots() -> None:
    """k speculative tokens: k more state pages and k more token slots a sequence."""
    flags = Flags(mamba_mode="none", lookahead_tokens=2)
    kv = model(QWEN35, flags=flags)
    assert kv.blocks(784) == 1 + 3 * 3
    assert project(model(flags=flags), [16], 16, 1).kv_blocks == 1 + 2


def test_sliding_layers_stop_growing() -> None:
    """gpt-oss: half of the layers hold at most window - 1 + batch tokens and a block."""
    kv = model(GPT_OSS, "vllm", "0.10.2", flags=Flags(max_num_batched_tokens=1024))
    assert [kv.blocks(n) for n in (16, 1024, 131072)] == [2, 128, 8192 + 73]


def test_without_the_hybrid_manager_sliding_layers_cost_full_length() -> None:
    """--disable-hybrid-kv-cache-manager: one group, every layer keeps every token."""
    kv = model(GPT_OSS, flags=Flags(hybrid_manager=False))
    assert (kv.is_hybrid, kv.blocks(131072)) == (False, 8192)


def test_smaller_pages_take_a_larger_block() -> None:
    """Gemma 4: pages of 4 x 512 and 16 x 256 become equal by a full block of 32 tokens."""
    config = LLAMA_8B | {"model_type": "gemma4_text", "num_hidden_layers": 60, "num_key_value_heads": 16, "head_dim": 256,
                         "global_head_dim": 512, "num_global_key_value_heads": 4, "sliding_window": 1024,
                         "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10}  # fmt: skip
    groups = {g.kind.value: (g.count, g.block_tokens) for g in model(config).pools[0].groups}
    assert groups == {"sliding": (5, 16), "full": (1, 32)}


@pytest.mark.parametrize(
    ("version", "sliding", "full", "counts"), [("0.10.2", 6, 5, {1}), ("0.10.2", 5, 4, {1, 2}), ("0.33", 5, 4, {1})]
)
def test_groups_of_nearly_equal_size_are_padded(version: str, sliding: int, full: int, counts: set[int]) -> None:
    """One padded group each while the counts are within 1.25 (1.5 in recent versions), else the larger is split."""
    layers = ["sliding_attention"] * sliding + ["full_attention"] * full
    config = GPT_OSS | {"num_hidden_layers": len(layers), "layer_types": layers}
    assert {g.count for g in model(config, "vllm", version).pools[0].groups} == counts


def test_a_pool_of_equal_pages_is_shared_by_stages() -> None:
    """With pipeline stages a hybrid's groups are strided, so each stage holds its share of every group."""
    kv = model(QWEN35, pp=4, flags=Flags(mamba_mode="none"))
    assert len(set(kv.pools[0].shard_block_bytes)) == 1


# --- other engines -----------------------------------------------------------------------------------------


def test_sglang_counts_the_tighter_of_two_pools() -> None:
    """The sliding pool has 0.8 of the full pool's tokens, so short requests need 1.25 of its share."""
    kv = model(GPT_OSS, "sglang")
    assert (kv.blocks(100), kv.blocks(100_000)) == (125, 100_000)


def test_sglang_states_lie_beside_the_pool() -> None:
    """Recurrent states take no tokens of the pool and bytes of their own per sequence."""
    kv = model(QWEN35, "sglang")
    p = project(kv, [100], 50, 1)
    assert (p.kv_blocks, kv.state_in_pool) == (150, False)
    assert p.bytes_per_shard[0] == p.kv_bytes + p.state_bytes


def test_llamacpp_caches_sliding_layers_in_a_window() -> None:
    """Cells beyond window + ubatch cost only the full layers."""
    kv = model(GPT_OSS, "llamacpp", flags=Flags(n_ubatch=512))
    full_cell, sliding_cell = 18 * 2048, 18 * 2048
    assert kv.sequence_bytes(10_000) == (10_000 * full_cell + 768 * sliding_cell,)


def test_ollama_multiplies_the_context_by_its_slots() -> None:
    """num_ctx is one slot's on Ollama and the total on llama-server."""
    options = Flags(n_parallel=4)
    shape = geometry(LLAMA_8B)
    sizes = [
        cell_cache(shape, engine_rules(e), kv_types("f16"), 2048, options).total_bytes for e in ("llamacpp", "ollama")
    ]
    assert sizes == [2048 * 131072, 4 * 2048 * 131072]


def test_llamacpp_splits_layers_over_devices() -> None:
    """Two devices hold half of the layers each, heads whole."""
    assert model(LLAMA_8B, "llamacpp", tp=2).bytes_per_token_per_shard == (65536, 65536)


@pytest.mark.parametrize(("mla", "ratio"), [("latent", 1.0), ("latent_kv", 1088 / 576), ("heads", 128 * 320 / 576)])
def test_latent_caches_of_llamacpp_builds(mla: str, ratio: float) -> None:
    """The latent alone, with a V copy (1.89 x), or as full heads (71 x)."""
    base = model(DEEPSEEK, "llamacpp").bytes_per_token
    assert model(DEEPSEEK, "llamacpp", flags=Flags(mla=mla)).bytes_per_token == pytest.approx(base * ratio)


def test_engines_price_one_model_differently() -> None:
    """The engine is a parameter: one request, four answers."""
    need = {
        e: sum(project(model(GPT_OSS, e), [5000], 1000, 1).bytes_per_shard)
        for e in ("vllm", "sglang", "llamacpp", "ik_llamacpp")
    }
    assert need["llamacpp"] < need["ik_llamacpp"]
    assert len(set(need.values())) == 4


def test_versions_of_an_engine_differ() -> None:
    """Delta-net states were bf16 in vLLM 0.10 and are f32 since: the block nearly doubles."""
    flags = Flags(mamba_mode="none")
    assert (
        model(QWEN35, "vllm", "0.10.2", flags=flags).block_tokens
        < model(QWEN35, "vllm", "0.17", flags=flags).block_tokens
    )


@pytest.mark.parametrize("name", ["llama.cpp", "TensorRT-LLM", "ik_llama.cpp", "VLLM"])
def test_engine_names_are_forgiving(name: str) -> None:
    """Spellings in use are understood."""
    assert engine_rules(name).block_tokens >= 1


def test_an_unknown_engine_lists_the_known_ones() -> None:
    """The error says what is known."""
    with pytest.raises(GeometryError, match="known: vllm"):
        engine_rules("exllama")


# --- one request -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "output", "sequences", "blocks", "inputs"),
    [
        ([1000], 300, 1, 63 + 19, 63),
        ([1000], 300, 4, 63 + 4 * 19 + 3, 63),  # n or best_of: the prompt's blocks once, a partial block a sequence
        ([16, 17], 1, 2, 1 + 2 + 2, 3),
        ([16, 17], 0, 2, 3, 3),  # embeddings and scoring produce nothing
        ([0], 0, 1, 0, 0),
        ([], 5, 0, 0, 0),
    ],
)
def test_blocks_of_a_request(prompts: list[int], output: int, sequences: int, blocks: int, inputs: int) -> None:
    """Sum over prompts of blocks(input) + sequences x blocks(output) + one partial block per extra sequence."""
    p = project(model(), prompts, output, sequences)
    assert (p.kv_blocks, p.input_blocks, p.kv_bytes) == (blocks, inputs, blocks * 16 * 131072)


def test_sequences_are_at_least_one_a_prompt() -> None:
    """A count that forgets a prompt is raised to the prompts."""
    assert project(model(), [16, 16], 16, 1).kv_blocks == 4


def test_without_prefix_sharing_every_sequence_pays_its_prompt() -> None:
    """Nothing is shared when prefix caching is off."""
    kv = model(flags=Flags(prefix_caching=False))
    assert project(kv, [160], 16, 3).kv_blocks == 10 + 1 + 2 * 11


def test_tokens_only_counts_blocks_without_a_geometry() -> None:
    """Where the model is unknown blocks are counted and bytes are 0."""
    p = project(KvModel.tokens_only(32, shards=2), [100], 10, 2)
    assert (p.kv_blocks, p.kv_bytes, p.bytes_per_shard) == (4 + 2 + 1, 0, (0, 0))


def test_absurd_requests_stay_within_what_redis_can_hold() -> None:
    """A request of 10**30 tokens projects the largest exact Lua integer."""
    assert project(model(), [10**30], 1, 1).kv_blocks == 2**53 - 1
    assert project(model(QWEN35), [10**30], 1, 1).kv_blocks == 2**53 - 1


@pytest.mark.parametrize("arguments", [([-1], 0, 1), ([1], -1, 1), ([1], 0, -1)])
def test_negative_counts_are_a_mistake_of_ours(arguments: tuple[list[int], int, int]) -> None:
    """Negative counts never become a projection."""
    with pytest.raises(ValueError, match="negative"):
        project(model(), *arguments)


def test_a_projection_covers_what_the_engine_takes() -> None:
    """Against a sequence-by-sequence count of blocks held at the end, for every alignment of prompt and output."""
    for config in (LLAMA_8B, GPT_OSS, QWEN35):
        kv = model(config)
        for prompt in (1, 15, 16, 17, 783, 784, 785, 5000):
            for output in (0, 1, 16, 300, 900):
                assert project(kv, [prompt], output, 1).kv_blocks >= kv.blocks(prompt + output)


def test_shards_add_up() -> None:
    """Bytes over the shards are the request's bytes, with uneven stages too."""
    p = project(model(LLAMA_8B | {"num_hidden_layers": 33}, tp=2, pp=2), [1000], 100, 2)
    assert sum(p.bytes_per_shard) == p.kv_bytes
    assert len(p.bytes_per_shard) == 4


def test_figures_are_whole_numbers() -> None:
    """Nothing is a float: sums over a fleet stay exact."""
    p = project(model(GPT_OSS, "sglang"), [1000], 100, 1)
    assert all(
        isinstance(v, int) and math.isfinite(v) for v in (p.kv_blocks, p.input_blocks, p.kv_bytes, *p.bytes_per_shard)
    )


@pytest.mark.parametrize(
    ("prompt", "hit", "shared"), [(100, 80, 80), (100, 79, 64), (96, 96, 80), (0, 10, 0), (10, 0, 0), (1, 1, 0)]
)
def test_prefixes_are_shared_by_whole_blocks(prompt: int, hit: int, shared: int) -> None:
    """Only whole blocks count and the last token is always computed."""
    assert shared_prefix_tokens(model(), prompt, hit) == shared


def test_prefix_hits_on_hybrids_align_to_the_large_block() -> None:
    """Qwen3.5-27B: nothing below 784 tokens is shared."""
    kv = model(QWEN35)
    assert [shared_prefix_tokens(kv, 5000, hit) for hit in (783, 784, 1567, 1568)] == [0, 784, 784, 1568]


@pytest.mark.parametrize("layout", [{"tp": 1}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_measured_cost_replaces_the_computed_one_and_no_block_count(layout: dict[str, int]) -> None:
    """An operator's kvBytesPerToken scales every pool and state; a request holds as many blocks as before."""
    computed = model(QWEN35, **layout)
    measured = computed.measured(computed.bytes_per_token // 2)
    before, after = (project(kv, [5000], 700, 1) for kv in (computed, measured))
    assert (after.kv_blocks, after.input_blocks) == (before.kv_blocks, before.input_blocks)
    assert after.kv_bytes == pytest.approx(before.kv_bytes / 2, rel=1e-3)
    assert len(after.bytes_per_shard) == len(before.bytes_per_shard)


def test_a_measured_cost_stands_in_for_a_missing_geometry() -> None:
    """Without a geometry the cost lies evenly on the shards."""
    kv = KvModel.tokens_only(16, "m", "vllm", 2).measured(1000)
    projection = project(kv, [160], 0, 1)
    assert (projection.kv_blocks, projection.kv_bytes, projection.bytes_per_shard) == (10, 160_000, (80_000, 80_000))


# --- groups as vLLM 0.32.0's own kv_cache_utils made them ---------------------------------------------------


def _made_of(*groups: LayerGroup) -> Geometry:
    return Geometry("made", groups, spread(groups))


def test_layers_alike_on_a_shard_share_a_group() -> None:
    """KV heads that tensor parallelism brings to one a shard make one group of 62 layers, not two (7 groups in all)."""
    made = _made_of(LayerGroup(LayerKind.FULL, 9, 1, 128, 128), LayerGroup(LayerKind.SLIDING, 41, 4, 64, 64, window=128),
                    LayerGroup(LayerKind.SLIDING, 21, 2, 64, 64, window=128))  # fmt: skip
    kv = build_kv_model(made, engine_rules("vllm"), tp=4, flags=Flags(max_num_batched_tokens=8192))
    assert [(g.kind, g.count) for g in kv.pools[0].groups] == [(LayerKind.FULL, 1), (LayerKind.SLIDING, 7)]


def test_a_model_that_slides_everywhere_keeps_its_window_without_the_hybrid_manager() -> None:
    """Only windows beside full layers are given up: 33 sliding layers still hold at most window - 1 + two steps."""
    made = _made_of(LayerGroup(LayerKind.SLIDING, 33, 1, 256, 256, window=512))
    kv = build_kv_model(made, engine_rules("vllm"), flags=Flags(max_num_batched_tokens=8192, hybrid_manager=False))
    assert kv.charged_blocks(131072) == -(-(511 + 2 * 8192) // 16) + 1


@pytest.mark.parametrize(("version", "block"), [("0.10", 944), ("0.11.1", 960), ("0.32", 1024)])
def test_latent_attention_sets_the_granule_of_a_hybrids_block(version: str, block: int) -> None:
    """A state page of 1,085,440 B beside MLA rows of 1,152 B: multiples of 16, 64 and 128 tokens as versions went on."""
    made = _made_of(
        LayerGroup(LayerKind.MLA, 7, 1, 576),
        LayerGroup(LayerKind.STATE, 20, state=StateShape(0, 0, 0, 1, 1085440 // 4)),
    )
    kv = build_kv_model(made, engine_rules("vllm", version), kv_dtype="bf16", flags=Flags(ssm_dtype="f32"))
    assert kv.block_tokens == block


@pytest.mark.parametrize(
    ("version", "pp", "steps"), [("0.25.1", 1, 1), ("0.25.1", 2, 1), ("0.26.0", 1, 2), ("0.32", 2, 3)]
)
def test_steps_in_flight_by_version(version: str, pp: int, steps: int) -> None:
    """From 0.26 on a window holds the tokens of pp + 1 steps, before of one (vllm#49878)."""
    made = _made_of(LayerGroup(LayerKind.SLIDING, 8, 1, 64, 64, window=1024))
    kv = build_kv_model(made, engine_rules("vllm", version), pp=pp, flags=Flags(max_num_batched_tokens=4096))
    assert kv.pools[0].groups[0].cap_tokens == 1023 + steps * 4096
