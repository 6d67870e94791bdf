"""Properties of the memory model over arbitrary models, engines and requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from extproc.errors import GeometryError
from extproc.memory import (
    ENGINES,
    Flags,
    Geometry,
    KvModel,
    LayerGroup,
    LayerKind,
    StateShape,
    build_kv_model,
    engine_rules,
    geometry_from_config,
    image_size,
    image_tokens,
    project,
)
from extproc.memory.geometry import spread
from extproc.memory.gguf_geometry import geometry_from_gguf
from extproc.memory.vision import FAMILIES

DTYPES_BY_SIZE = ("q4_0", "q4_1", "q5_0", "q5_1", "fp8", "q8_0", "bf16", "f32")

heads = st.sampled_from([1, 2, 4, 8, 10, 32])
dims = st.sampled_from([64, 128, 256])
layers = st.integers(1, 40)
tokens = st.integers(0, 300_000)


@st.composite
def attention(draw: st.DrawFn, kind: LayerKind) -> LayerGroup:
    """Layers that attend."""
    if kind is LayerKind.MLA:
        return LayerGroup(kind, draw(layers), 1, 576, mha_heads=16, mha_k_dim=192, mha_v_dim=128)
    window = draw(st.sampled_from([128, 512, 4096])) if kind in (LayerKind.SLIDING, LayerKind.CHUNKED) else 0
    return LayerGroup(kind, draw(layers), draw(heads), dim := draw(dims), dim, window=window)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Full layers, possibly beside sliding, chunked or recurrent ones."""
    groups = [draw(attention(draw(st.sampled_from([LayerKind.FULL, LayerKind.MLA]))))]
    for kind in draw(
        st.lists(st.sampled_from([LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.STATE]), max_size=2, unique=True)
    ):
        if kind is LayerKind.STATE:
            v_heads = draw(st.sampled_from([16, 32, 48]))
            state = StateShape(v_heads * 128, 16, 256, 4, v_heads * 128 * 128)
            groups.append(LayerGroup(kind, draw(layers), state=state))
        else:
            groups.append(draw(attention(kind)))
    return Geometry("m", tuple(groups), spread(groups), hidden=4096, heads=32, vocab=32000, where="m")


@st.composite
def models(draw: st.DrawFn) -> KvModel:
    """A geometry on an engine in some layout."""
    geometry = draw(geometries())
    flags = Flags(
        lookahead_tokens=draw(st.sampled_from([0, 0, 3])),
        prefix_caching=draw(st.booleans()),
        hybrid_manager=draw(st.booleans()),
        max_num_batched_tokens=draw(st.sampled_from([None, 1024, 16384])),
    )
    pp = draw(st.integers(1, min(4, len(geometry.layer_map))))
    return build_kv_model(
        geometry, engine_rules(draw(st.sampled_from(ENGINES))), kv_dtype=draw(st.sampled_from(DTYPES_BY_SIZE)),
        tp=draw(st.sampled_from([1, 2, 4, 8])), pp=pp, flags=flags,
    )  # fmt: skip


requests = st.tuples(st.lists(tokens, min_size=1, max_size=4), st.integers(0, 50_000), st.integers(1, 9))


@given(models(), requests, st.integers(0, 20_000))
def test_more_tokens_never_cost_less(kv: KvModel, request: tuple[list[int], int, int], more: int) -> None:
    """Monotone in every prompt and in the output."""
    prompts, output, sequences = request
    base = project(kv, prompts, output, sequences)
    longer = project(kv, [prompts[0] + more, *prompts[1:]], output, sequences)
    talkative = project(kv, prompts, output + more, sequences)
    for other in (longer, talkative):
        assert other.kv_blocks >= base.kv_blocks
        assert all(b >= a for a, b in zip(base.bytes_per_shard, other.bytes_per_shard, strict=True))


@given(models(), requests)
def test_more_sequences_never_cost_less(kv: KvModel, request: tuple[list[int], int, int]) -> None:
    """Monotone in sequences."""
    prompts, output, sequences = request
    base, more = project(kv, prompts, output, sequences), project(kv, prompts, output, sequences + 1)
    assert more.kv_blocks >= base.kv_blocks
    assert sum(more.bytes_per_shard) >= sum(base.bytes_per_shard)


@given(geometries(), st.sampled_from(ENGINES), st.data())
def test_larger_elements_never_cost_less(geometry: Geometry, engine: str, data: st.DataObject) -> None:
    """Monotone in the KV type: bytes per token with the type's exact size."""
    low = data.draw(st.integers(0, len(DTYPES_BY_SIZE) - 2))
    high = data.draw(st.integers(low + 1, len(DTYPES_BY_SIZE) - 1))
    rates = [
        build_kv_model(geometry, engine_rules(engine), kv_dtype=DTYPES_BY_SIZE[i]).bytes_per_token for i in (low, high)
    ]
    assert rates[0] < rates[1]


@given(models(), requests)
def test_figures_are_whole_finite_and_not_negative(kv: KvModel, request: tuple[list[int], int, int]) -> None:
    """Never negative, NaN or beyond what Redis holds exactly."""
    p = project(kv, *request)
    figures = (p.kv_blocks, p.input_blocks, p.kv_bytes, p.state_bytes, *p.bytes_per_shard)
    assert all(isinstance(f, int) and math.isfinite(f) and f >= 0 for f in figures)
    assert p.input_blocks <= p.kv_blocks <= 2**53 - 1


@given(models(), requests)
def test_shards_add_up_to_the_request(kv: KvModel, request: tuple[list[int], int, int]) -> None:
    """Bytes over the shards are the pools' bytes and the states beside them."""
    p = project(kv, *request)
    beside = 0 if kv.state_in_pool else p.state_bytes
    assert sum(p.bytes_per_shard) == p.kv_bytes + beside
    assert len(p.bytes_per_shard) == kv.shards


@given(models(), st.integers(1, 100_000), st.integers(0, 10_000))
def test_a_projection_covers_the_sequence_it_becomes(kv: KvModel, prompt: int, output: int) -> None:
    """A true upper bound: the engine holds no more for prompt + output tokens."""
    p = project(kv, [prompt], output, 1)
    assert p.kv_blocks >= kv.blocks(prompt + output)
    assert all(a >= b for a, b in zip(p.bytes_per_shard, kv.sequence_bytes(prompt + output), strict=True))


@given(models(), st.integers(1, 60_000), st.integers(0, 5_000), st.integers(2, 6))
def test_shared_prompts_cost_no_more_than_separate_requests(kv: KvModel, prompt: int, output: int, n: int) -> None:
    """n answers to one prompt never exceed n requests, and never undercut one."""
    together, alone = project(kv, [prompt], output, n).kv_blocks, project(kv, [prompt], output, 1).kv_blocks
    assert alone <= together <= n * (alone + len(kv.pools[0].groups) * max(g.count for g in kv.pools[0].groups))


@given(geometries(), st.sampled_from(ENGINES), st.integers(1, 200_000))
def test_a_hybrid_is_never_cheaper_than_its_full_layers_alone(geometry: Geometry, engine: str, length: int) -> None:
    """Sliding, chunked and recurrent layers add to the full ones, never take away."""
    full = tuple(g for g in geometry.groups if g.kind in (LayerKind.FULL, LayerKind.MLA))
    alone = replace(geometry, groups=full, layer_map=spread(full))
    rules = engine_rules(engine)
    whole, part = (sum(build_kv_model(g, rules).sequence_bytes(length)) for g in (geometry, alone))
    assert whole >= part


@given(heads, dims, layers, st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_tensor_parallelism_replicates_heads(kv_heads: int, dim: int, count: int, tp: int) -> None:
    """The cost of a device falls until it has one head; the cluster's cost never falls and grows from there."""
    group = LayerGroup(LayerKind.FULL, count, kv_heads, dim, dim)
    geometry = Geometry("m", (group,), spread((group,)), where="m")
    one, many = (build_kv_model(geometry, engine_rules("vllm"), kv_dtype="bf16", tp=n) for n in (1, tp))
    head = count * 2 * dim * 2
    assert many.bytes_per_token_per_shard == (head * max(1, -(-kv_heads // tp)),) * tp
    assert many.bytes_per_token >= one.bytes_per_token
    if tp > kv_heads:
        assert many.bytes_per_token == tp * head


@given(geometries(), st.integers(1, 4), st.sampled_from(["vllm", "tgi", "trtllm"]))
def test_pipeline_stages_hold_every_layer_once(geometry: Geometry, pp: int, engine: str) -> None:
    """Bytes per token over the stages are those of one device."""
    assume(pp <= len(geometry.layer_map))
    one, split = (build_kv_model(geometry, engine_rules(engine), pp=n) for n in (1, pp))
    assert sum(split.bytes_per_token_per_shard) == one.bytes_per_token


@given(models(), st.integers(0, 1 << 40))
def test_pool_blocks_fit_into_the_memory_given(kv: KvModel, available: int) -> None:
    """What is planned is there: blocks x bytes never exceed the memory of any shard."""
    blocks = kv.pool_blocks(available)
    assert all(blocks * b <= available for b in kv.pools[0].shard_block_bytes)


def outcome(parse: Callable[[], Geometry]) -> Geometry | str:
    """A geometry, or the text of the GeometryError."""
    try:
        return parse()
    except GeometryError as error:
        return str(error)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 100_000) | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
config_keys = st.sampled_from(
    ["model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "layer_types", "sliding_window",
     "kv_lora_rank", "qk_rope_head_dim", "text_config", "hybrid_override_pattern", "full_attention_interval", "linear_num_value_heads",
     "block_configs", "linear_attn_config", "attn_type_list", "num_kv_shared_layers", "quantization_config", "no_rope_layers",
     "cross_attention_layers", "attn_layer_indices", "vocab_size", "intermediate_size", "torch_dtype", "max_position_embeddings"]
)  # fmt: skip


BASES = (
    {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "vocab_size": 99},
    {"model_type": "qwen3_next", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512, "full_attention_interval": 4, "vocab_size": 9,
     "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
    {"model_type": "deepseek_v2", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512, "kv_lora_rank": 64, "qk_rope_head_dim": 8,
     "vocab_size": 9, "qk_nope_head_dim": 8, "v_head_dim": 8},
    {"model_type": "nemotron_h", "num_hidden_layers": 3, "hybrid_override_pattern": "M*-", "num_attention_heads": 8, "hidden_size": 512,
     "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "conv_kernel": 4, "vocab_size": 9},
    {},
)  # fmt: skip


@given(st.sampled_from(BASES), st.dictionaries(config_keys, json_values, max_size=4))
def test_any_config_is_a_geometry_or_one_clear_error(base: dict[str, object], changes: dict[str, object]) -> None:
    """No configuration, however broken, ends in anything but a geometry or a GeometryError that names the file."""
    found = outcome(lambda: geometry_from_config(base | changes, where="x/config.json"))
    assert isinstance(found, Geometry) or found.startswith("x/config.json")


gguf_keys = st.sampled_from(
    ["block_count", "attention.head_count", "attention.head_count_kv", "embedding_length", "attention.key_length", "attention.sliding_window",
     "attention.sliding_window_pattern", "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "attention.kv_lora_rank", "nextn_predict_layers",
     "attention.shared_kv_layers", "full_attention_interval", "context_length", "feed_forward_length", "rope.dimension_count"]
)  # fmt: skip


@given(
    st.sampled_from(["llama", "gemma3", "deepseek2", "qwen3next", "nemotron_h"]),
    st.dictionaries(gguf_keys, json_values, max_size=12),
)
def test_any_gguf_metadata_is_a_geometry_or_one_clear_error(arch: str, fields: dict[str, object]) -> None:
    """The same for GGUF metadata."""
    base = {"block_count": 4, "attention.head_count": 8, "embedding_length": 512, "feed_forward_length": 64}
    named = {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in (base | fields).items()}
    found = outcome(lambda: geometry_from_gguf(named, "x.gguf"))
    assert isinstance(found, Geometry) or found.startswith("x.gguf")


@given(
    st.binary(max_size=200), st.sampled_from([b"", b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF0000WEBPVP8 "])
)
def test_any_bytes_are_a_size_or_unknown(data: bytes, magic: bytes) -> None:
    """A header never raises and never gives an empty picture."""
    size = image_size(magic + data)
    assert size is None or (size[0] > 0 and size[1] > 0)


@given(st.sampled_from(sorted(FAMILIES)), st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_image_tokens_stay_within_the_family(family: str, width: int, height: int) -> None:
    """At least one token, at most the family's maximum."""
    assert 1 <= image_tokens(family, width, height) <= FAMILIES[family].maximum
