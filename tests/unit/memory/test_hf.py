"""Geometry of ``config.json``: what is cached, per family, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from extproc.errors import GeometryError
from extproc.memory import Geometry, LayerKind, build_kv_model, engine_rules, geometry_from_config
from extproc.memory.weights import geometry_weights, own_format

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


def parse(config: Mapping[str, object]) -> Geometry:
    """The geometry of one configuration."""
    return geometry_from_config(config, where="m/config.json")


def shape(geometry: Geometry) -> list[tuple[str, int, int, int, int, int]]:
    """(kind, layers, heads, k, v, window) of each group."""
    return [(str(g.kind), g.layers, g.kv_heads, g.k_dim, g.v_dim, g.window) for g in geometry.groups]


CASES = {
    "grouped queries": (LLAMA, [("full", 32, 8, 128, 128, 0)]),
    "no kv heads means one per query head": (
        {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, [("full", 32, 32, 128, 128, 0)]),
    "head_dim wins over hidden / heads": (LLAMA | {"head_dim": 64}, [("full", 32, 8, 64, 64, 0)]),
    "multi-query": (
        {"model_type": "gpt_bigcode", "n_layer": 4, "n_head": 8, "n_embd": 512, "multi_query": True},
        [("full", 4, 1, 64, 64, 0)]),
    "text_config": ({"model_type": "mistral3", "text_config": LLAMA | {"model_type": "mistral"}}, [("full", 32, 8, 128, 128, 0)]),
    "latent attention": (
        LLAMA | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
        [("mla", 32, 1, 576, 0, 0)]),
    "unpacked latent attention": (
        LLAMA | {"model_type": "minicpm3", "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "num_key_value_heads": 32},
        [("full", 32, 32, 96, 96, 0)]),
    "groups by Step's name": (
        {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"} | {"model_type": "step3p5", "num_attention_groups": 4},
        [("full", 32, 4, 128, 128, 0)]),
    "two attentions a layer": (
        LLAMA | {"model_type": "longcat_flash", "num_hidden_layers": None, "num_layers": 28, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        [("mla", 56, 1, 576, 0, 0)]),
    "two attentions a layer, saved again": (
        LLAMA | {"model_type": "longcat_flash", "num_hidden_layers": 56, "num_layers": 28, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        [("mla", 56, 1, 576, 0, 0)]),
    "a pattern in letters": (
        LLAMA | {"model_type": "exaone4", "sliding_window": 4096, "sliding_window_pattern": "LLLG"},
        [("sliding", 24, 8, 128, 128, 4096), ("full", 8, 8, 128, 128, 0)]),
    "an interval beside its list": (
        LLAMA | {"model_type": "afmoe", "sliding_window": 2048, "global_attn_every_n_layers": 4,
                 "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8},
        [("sliding", 24, 8, 128, 128, 2048), ("full", 8, 8, 128, 128, 0)]),
    "sliding layers of another width": (
        LLAMA | {"model_type": "mimo_v2_flash", "num_hidden_layers": 4, "hybrid_layer_pattern": [0, 1, 1, 0], "head_dim": 192, "v_head_dim": 128,
                 "swa_num_key_value_heads": 16, "swa_head_dim": 192, "swa_v_head_dim": 128, "sliding_window": 128, "num_key_value_heads": 4},
        [("full", 2, 4, 192, 128, 0), ("sliding", 2, 16, 192, 128, 128)]),
    "sliding everywhere": (LLAMA | {"model_type": "mistral", "sliding_window": 4096}, [("sliding", 32, 8, 128, 128, 4096)]),
    "a window that nothing outgrows": (LLAMA | {"model_type": "mistral", "sliding_window": 131072}, [("full", 32, 8, 128, 128, 0)]),
    "sliding switched off": (
        LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, [("full", 32, 8, 128, 128, 0)]),
    "sliding above a layer": (
        LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 20},
        [("full", 20, 8, 128, 128, 0), ("sliding", 12, 8, 128, 128, 4096)]),
    "gemma 3 by pattern, with class defaults": (
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}},
        [("sliding", 29, 4, 256, 256, 1024), ("full", 5, 4, 256, 256, 0)]),
    "gemma 2 alternates": (
        LLAMA | {"model_type": "gemma2", "num_hidden_layers": 26, "head_dim": 256, "num_key_value_heads": 4},
        [("sliding", 13, 4, 256, 256, 4096), ("full", 13, 4, 256, 256, 0)]),
    "a list wins over a pattern": (
        LLAMA | {"model_type": "gemma2", "num_hidden_layers": 2, "layer_types": ["full_attention", "full_attention"], "head_dim": 256},
        [("full", 2, 8, 256, 256, 0)]),
    "two head sizes": (
        LLAMA | {"model_type": "gemma4_text", "num_hidden_layers": 2, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 4,
                 "sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 16},
        [("sliding", 1, 16, 256, 256, 1024), ("full", 1, 4, 512, 512, 0)]),
    "shared layers own nothing": (
        LLAMA | {"model_type": "gemma3n_text", "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 512, "head_dim": 256,
                 "layer_types": ["sliding_attention", "full_attention"] * 2},
        [("sliding", 1, 8, 256, 256, 512), ("full", 1, 8, 256, 256, 0)]),
    "llama 4 chunks": (LLAMA | {"model_type": "llama4_text", "num_hidden_layers": 48, "attention_chunk_size": 8192},
                       [("chunked", 36, 8, 128, 128, 8192), ("full", 12, 8, 128, 128, 0)]),
    "delta net by interval": (LLAMA | DELTA | {"model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4},
                              [("state", 36, 0, 0, 0, 0), ("full", 12, 8, 128, 128, 0)]),
    "jamba by period": (
        LLAMA | {"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4},
        [("state", 28, 0, 0, 0, 0), ("full", 4, 8, 128, 128, 0)]),
    "nemotron-h by letters": (
        LLAMA | {"model_type": "nemotron_h", "num_hidden_layers": 6, "hybrid_override_pattern": "M-M*-E", "mamba_num_heads": 8,
                 "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4},
        [("state", 2, 0, 0, 0, 0), ("full", 1, 8, 128, 128, 0)]),
    "layers without attention": (
        LLAMA | {"model_type": "nemotron-nas", "num_hidden_layers": 3, "num_key_value_heads": None, "block_configs": [
            {"attention": {"n_heads_in_group": 8}}, {"attention": {"n_heads_in_group": None, "no_op": True}}, {"attention": {"n_heads_in_group": 4}}]},
        [("full", 1, 4, 128, 128, 0), ("full", 1, 8, 128, 128, 0)]),
    "cross attention": (
        {"model_type": "mllama", "text_config": LLAMA | {"model_type": "mllama_text_model", "num_hidden_layers": 4, "cross_attention_layers": [1]}},
        [("full", 3, 8, 128, 128, 0), ("cross", 1, 8, 128, 128, 0)]),
    "attention and state in one layer": (
        LLAMA | {"model_type": "falcon_h1", "num_hidden_layers": 2, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1,
                 "mamba_d_state": 128, "mamba_d_conv": 4},
        [("full", 2, 8, 128, 128, 0), ("state", 2, 0, 0, 0, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_layer_groups(case: str) -> None:
    """Each family's fields become the groups its engine caches."""
    config, expected = CASES[case]
    assert shape(parse(config)) == expected


REFUSED = {
    "missing layers": ({"model_type": "llama"}, "'num_hidden_layers'"),
    "layers of nonsense": (LLAMA | {"num_hidden_layers": "many"}, "'num_hidden_layers'"),
    "no layers": (LLAMA | {"num_hidden_layers": 0}, "'num_hidden_layers'"),
    "heads that do not divide": (LLAMA | {"num_attention_heads": 33, "num_key_value_heads": 3}, "'head_dim'"),
    "an unknown kind in a list": (LLAMA | {"layer_types": ["quantum_attention"] * 32}, "'layer_types[0]'"),
    "a list that is too short": (LLAMA | {"layer_types": ["full_attention"]}, "'layer_types'"),
    "letters that do not match": (LLAMA | {"hybrid_override_pattern": "M*"}, "'hybrid_override_pattern'"),
    "recurrent layers without sizes": (LLAMA | {"model_type": "qwen3_next", "full_attention_interval": 4}, "'layer_types'"),
    "an unknown family with compression": (LLAMA | {"model_type": "deepseek_v4", "compress_ratios": [4]}, "'compress_ratios'"),
    "an unknown family that slides": (LLAMA | {"model_type": "novel", "sliding_window": 512}, "'sliding_window'"),
    "an unknown family with a cache rule": (LLAMA | {"model_type": "novel", "kv_sharing_map": [0, 1]}, "'kv_sharing_map'"),
    "an unknown family of mixers": (LLAMA | {"model_type": "novel", "mixer_types": ["sparse", "lightning"] * 16}, "'mixer_types'"),
    "an interval without its list": (LLAMA | {"model_type": "afmoe", "sliding_window": 2048}, "'layer_types'"),
    "a pattern in other letters": (
        LLAMA | {"model_type": "exaone4", "sliding_window": 4096, "sliding_window_pattern": "LXLG"}, "'sliding_window_pattern'"),
    "latent rank without rope": (LLAMA | {"model_type": "deepseek_v2", "kv_lora_rank": 512}, "'qk_rope_head_dim'"),
    "negative heads": (LLAMA | {"num_key_value_heads": -1}, "'num_key_value_heads'"),
    "a boolean number": (LLAMA | {"num_hidden_layers": True}, "'num_hidden_layers'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_file_and_field(case: str) -> None:
    """What is not understood is an error that names the file and the field, never a guess."""
    config, field = REFUSED[case]
    with pytest.raises(GeometryError) as caught:
        parse(config)
    assert str(caught.value).startswith("m/config.json")
    assert field in str(caught.value)


def test_an_unknown_plain_family_is_read() -> None:
    """A family without a name here but with nothing unusual is grouped-query attention."""
    assert shape(parse(LLAMA | {"model_type": "novel"})) == [("full", 32, 8, 128, 128, 0)]


def test_prediction_layers_count_only_under_speculation() -> None:
    """MTP layers hold KV when they speculate and not otherwise (GLM-4.5-Air: 46 of 47 blocks)."""
    geometry = parse(LLAMA | {"model_type": "glm4_moe", "num_hidden_layers": 46, "num_nextn_predict_layers": 1})
    assert (geometry.groups[0].layers, geometry.with_mtp().groups[0].layers) == (46, 47)


def test_the_sparse_indexer_is_a_cache_of_its_own() -> None:
    """DeepSeek V3.2's indexer keeps 132 bytes a token and layer beside the latent."""
    config = LLAMA | {"model_type": "deepseek_v32", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    assert parse(config).groups[0].extra_row_bytes == 132


def test_layer_order_is_kept_for_pipeline_stages() -> None:
    """The layer map says for each layer, in order, which group it is in."""
    geometry = parse(LLAMA | DELTA | {"model_type": "qwen3_next", "num_hidden_layers": 8, "full_attention_interval": 4})
    assert geometry.layer_map == (0, 0, 0, 1, 0, 0, 0, 1)
    assert geometry.groups[1].kind is LayerKind.FULL


FP8_GROUP = {"num_bits": 8, "type": "float"}
FP4_GROUP = {"num_bits": 4, "type": "float", "group_size": 16}
FP8_KV = {"num_bits": 8, "type": "float", "dynamic": False}


def packed(*groups: dict[str, object], **fields: object) -> dict[str, object]:
    """A compressed-tensors block with these groups of weights."""
    named = {f"group_{n}": {"weights": weights, "targets": ["Linear"]} for n, weights in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, **fields}


@pytest.mark.parametrize(
    ("config", "label"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq", "bits": 8}, "gptq-int8"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {"weights": {"num_bits": 4}}}}, "w4a16"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb-4bit"),
        ({"quant_method": "intel/auto-round", "bits": 4}, "gptq"),
        (packed(FP8_GROUP), "fp8"),
        (packed(FP4_GROUP, kv_cache_scheme=FP8_KV), "nvfp4"),
        (packed(FP8_GROUP, FP4_GROUP, format="mixed-precision"), "fp8"),
        (packed({"num_bits": 4, "type": "int"}, kv_cache_scheme=FP8_KV), "w4a16"),
        (packed(kv_cache_scheme=FP8_KV), "none"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"g": {"weights": FP4_GROUP}}}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
          "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}, "b": {"quant_algo": "FP8"}}}, "fp8"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}, "bias": None}}, "fp8"),
    ],
)  # fmt: skip
def test_weight_format_of_a_quantised_checkpoint(config: dict[str, object], label: str) -> None:
    """The quantisation block names the weight format; of several the dearest, and what quantises the cache is none."""
    assert parse(LLAMA | {"quantization_config": config}).quantization == label


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 5},
        {"quant_method": "exl3", "bits": 3.0},
        {"quant_method": "hqq"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        packed({"num_bits": 2, "type": "int"}),
        packed(FP8_GROUP, {"num_bits": 2, "type": "int"}),
    ],
)
def test_a_format_of_unknown_bits_has_no_weights(config: dict[str, object]) -> None:
    """Its cache is known; who asks for the weights hears file and field, or gives their size."""
    geometry = parse(LLAMA | {"quantization_config": config})
    with pytest.raises(GeometryError, match=r"^m/config\.json: field 'quantization_config' names"):
        geometry_weights(geometry)
    assert geometry_weights(geometry, own_format(geometry, 10**9), 10**9)[0] == 10**9
    assert geometry_weights(replace(geometry, weights_bytes=10**9))[0] == 10**9


@pytest.mark.parametrize(
    ("config", "kv_type"),
    [
        (packed(FP8_GROUP, kv_cache_scheme=FP8_KV), "fp8"),
        (packed(FP8_GROUP, kv_cache_scheme=None), "bf16"),
        (packed(FP8_GROUP, kv_cache_scheme={"num_bits": 8, "type": "int"}), "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}, "bf16"),
    ],
)
def test_a_checkpoint_may_ask_for_its_kv_type(config: dict[str, object], kv_type: str) -> None:
    """vLLM takes it where none is asked for; older versions, other engines and an explicit type do not."""
    geometry = parse(LLAMA | {"quantization_config": config})
    newest = engine_rules("vllm")
    assert build_kv_model(geometry, newest).kv_dtype == kv_type
    assert build_kv_model(geometry, newest, kv_dtype="bf16").kv_dtype == "bf16"
    assert build_kv_model(geometry, engine_rules("vllm", "0.12.0")).kv_dtype == "bf16"
    assert build_kv_model(geometry, engine_rules("llamacpp")).kv_dtype == "f16"


PUBLISHED = {
    "Qwen2-7B": (
        {"model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584,
         "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False}, 7_615_616_512),
    "Llama-3.1-8B": (LLAMA | {"tie_word_embeddings": False}, 8_030_261_248),
    "Qwen3-30B-A3B": (
        {"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
         "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "decoder_sparse_step": 1,
         "vocab_size": 151936, "tie_word_embeddings": False}, 30_532_122_624),
}  # fmt: skip


@pytest.mark.parametrize("model", PUBLISHED)
def test_parameter_count_matches_the_published_one(model: str) -> None:
    """Counted parameters agree with the checkpoints' own totals within a tenth of a thousandth."""
    config, published = PUBLISHED[model]
    params = parse(config).params
    assert params is not None
    assert params.total == pytest.approx(published, rel=1e-4)


MAMBA = {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4}
ODD: Mapping[str, tuple[Mapping[str, object], str]] = {
    "a number as text": ({"num_hidden_layers": "32"}, "num_hidden_layers"),
    "not a number": ({"hidden_size": float("nan")}, "hidden_size"),
    "a list where one figure stands": ({"hidden_size": [1] * 400}, "hidden_size"),
    "a family that is no text": ({"model_type": ["llama"]}, "model_type"),
    "a nested model that is no object": ({"text_config": [1]}, "text_config"),
    "a number type that nothing computes in": ({"torch_dtype": "float7"}, "dtype"),
    "layer kinds that are no list": ({"layer_types": "full_attention"}, "layer_types"),
    "more layer kinds than layers": ({"layer_types": ["full_attention"] * 33}, "layer_types"),
    "heads that do not divide": ({"num_key_value_heads": 33}, "num_key_value_heads"),
    "heads wider than any": ({"head_dim": 1 << 40}, "head_dim"),
    "a switch that is no switch": ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": "yes"}, "use_sliding_window"),
    "multi-query by a word": ({"model_type": "falcon", "num_key_value_heads": None, "multi_query": "true"}, "multi_query"),
    "no layer of its own": ({"model_type": "gemma3n_text", "sliding_window": 512, "num_kv_shared_layers": 32}, "num_kv_shared_layers"),
    "prediction layers without end": ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1 << 40}, "num_nextn_predict_layers"),
    "an attention layer behind the last": ({"model_type": "bamba", "attn_layer_indices": [9, 400]} | MAMBA, "attn_layer_indices"),
    "a cross layer behind the last": ({"model_type": "mllama_text_model", "cross_attention_layers": [32]}, "cross_attention_layers"),
    "an offset beyond its period": ({"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 8}, "attn_layer_offset"),
    "chunk flags as text": ({"model_type": "llama4_text", "no_rope_layers": "x" * 32}, "no_rope_layers"),
    "an empty convolution": ({"model_type": "lfm2", "layer_types": ["conv"] * 32, "conv_L_cache": 3, "conv_dim": 0}, "conv_dim"),
    "weights in a word": ({"quantization_config": "fp8"}, "quantization_config"),
    "weights in no method": ({"quantization_config": {"group_size": 64}}, "quantization_config"),
    "bits in a word": ({"quantization_config": {"quant_method": "gptq", "bits": "4"}}, "bits"),
    "a method in a list": ({"quantization_config": {"quant_method": ["fp8"]}}, "quant_method"),
    "a family that slides by a list, without it": ({"model_type": "gemma4_text", "sliding_window": 512}, "layer_types"),
    "an encoder": ({"model_type": "bert"}, "model_type"),
    "recurrent layers alone": ({"model_type": "mamba2"}, "model_type"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_what_is_not_understood_names_its_field(case: str) -> None:
    """An odd value is one short line with file and field, never a default in its place."""
    fields, named = ODD[case]
    with pytest.raises(GeometryError, match=rf"^m/config\.json: .*{named}") as caught:
        parse(LLAMA | fields)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_layer_kinds_may_go_on_with_the_prediction_layers() -> None:
    """Step-3.5 lists its three prediction layers behind its own."""
    config = LLAMA | {"layer_types": ["full_attention"] * 35, "num_nextn_predict_layers": 3}
    assert shape(parse(config)) == [("full", 32, 8, 128, 128, 0)]


def test_multi_query_by_attention_configuration() -> None:
    """MPT names one KV head by its attention type."""
    config = {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 2, "attn_config": {"attn_type": "multiquery_attention"}}  # fmt: skip
    assert shape(parse(config)) == [("full", 2, 1, 128, 128, 0)]


def test_bits_alone_name_a_format() -> None:
    """MLX repositories give bits and a group size and no method."""
    assert parse(LLAMA | {"quantization_config": {"group_size": 64, "bits": 4}}).quantization == "w4a16"


@pytest.mark.parametrize(
    "fields", [{"intermediate_size": "14336"}, {"tie_word_embeddings": "no"}, {"num_local_experts": -1}]
)
def test_weights_that_cannot_be_counted_say_why(fields: dict[str, object]) -> None:
    """The cache stands, and who asks for weights hears the field; a layer list no rule reads is not refused."""
    geometry = parse(LLAMA | fields)
    assert shape(geometry) == [("full", 32, 8, 128, 128, 0)]
    assert geometry.params is None
    with pytest.raises(GeometryError, match=next(iter(fields)).replace("num_local_experts", "num_experts")):
        geometry_weights(geometry)


@pytest.mark.parametrize("family", ["longcat_flash", "mimo_v2_flash"])
def test_a_family_whose_parameters_are_not_counted(family: str) -> None:
    """Its cache is known, its weights by their files alone."""
    geometry = parse(LLAMA | {"model_type": family, "num_layers": 16})
    assert (geometry.layers, geometry.params) == (32, None)
    with pytest.raises(GeometryError, match="field 'model_type' is"):
        geometry_weights(geometry)


NEMOTRON = LLAMA | {"model_type": "nemotron_h", "num_hidden_layers": 4, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
                    "ssm_state_size": 128, "conv_kernel": 4, "n_routed_experts": 8, "moe_intermediate_size": 1856}  # fmt: skip


def test_a_lone_block_list_counts_as_its_pattern_does() -> None:
    """Nemotron-H names its blocks by letters or by words: mixers without a feed-forward either way."""
    by_letters = parse(NEMOTRON | {"hybrid_override_pattern": "M*E-"})
    by_words = parse(NEMOTRON | {"layers_block_type": ["mamba", "attention", "moe", "mlp"]})
    assert by_letters.params is not None
    assert by_letters.params == by_words.params
    assert shape(by_letters) == shape(by_words)


def test_experts_by_a_list_of_layers() -> None:
    """moe_layer_freq of 0 and 1 a layer, and mlp_only_layers, say which layers are dense."""
    sparse = LLAMA | {"num_hidden_layers": 4, "num_experts": 8, "moe_intermediate_size": 512}
    routed = [parse(sparse | extra).params for extra in ({"moe_layer_freq": [0, 1, 1, 1]}, {"mlp_only_layers": [0]})]
    assert [p.experts if p else 0 for p in routed] == [3 * 3 * 4096 * 512 * 8] * 2


UNCOUNTED: Mapping[str, tuple[Mapping[str, object], str]] = {
    "no feed-forward size": ({k: v for k, v in LLAMA.items() if k != "intermediate_size"}, "intermediate_size"),
    "sizes of its own": ({"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 4, "vocab_size": 100352,
                          "attn_config": {"kv_n_heads": 8}, "ffn_config": {"ffn_hidden_size": 10752}}, "ffn_config"),
    "an expert size a layer": (LLAMA | {"model_type": "hunyuan_v1_moe", "num_experts": 64, "moe_intermediate_size": [3072] * 32},
                               "moe_intermediate_size"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNCOUNTED)
def test_parameters_are_counted_right_or_not_at_all(case: str) -> None:
    """What the count does not read leaves the weights unknown, by the field's name; the cache is known."""
    config, named = UNCOUNTED[case]
    geometry = parse(config)
    assert geometry.params is None
    assert named in geometry.uncounted
    assert geometry.groups[0].kv_heads == 8


def test_shared_experts_by_any_name() -> None:
    """HunYuan and ERNIE spell the experts that every token passes their own way."""
    sparse = LLAMA | {"num_experts": 8, "moe_intermediate_size": 512}
    counts = {n: parse(sparse | {n: 1}).params for n in ("n_shared_experts", "num_shared_expert", "moe_num_shared_experts")}  # fmt: skip
    assert len(set(counts.values())) == 1
    assert counts["num_shared_expert"] != parse(sparse).params
