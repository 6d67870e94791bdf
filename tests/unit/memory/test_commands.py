"""``kvgate estimate`` and ``kvgate plan`` as a user calls them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from extproc.commands import estimate as estimate_command
from extproc.commands import plan as plan_command
from extproc.errors import ConfigError, GeometryError, UsageError

CONFIG = {
    "model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584,
    "intermediate_size": 18944, "vocab_size": 152064, "torch_dtype": "bfloat16", "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip
KVGATE = """
models:
  coder: {geometry: Qwen/Qwen2.5-Coder-32B-Instruct, weights: {quantization: awq, sizeBytes: 19300000000}, contextTokens: 32768}
targets:
  primary-32b: {engine: vllm, model: coder, replicas: [{name: gpu-a-0, url: "http://127.0.0.1:8000", devices: [GPU-1]}]}
  remote: {engine: openai, url: "https://api.example.com", servedModel: m}
lanes:
  fast: {maxInputTokens: 6000, targets: [primary-32b]}
"""
STATE = {
    "replicas": [{"target": "primary-32b", "replica": "gpu-a-0", "engine": "vllm", "state": "ready", "age_s": 0.4,
                  "kv_capacity_blocks": 4096, "block_tokens": 16, "kv_used_blocks": 0, "running": 0, "waiting": 0,
                  "max_sequences": 256, "max_model_tokens": 32768, "prefill_tokens_per_s": 7800, "reservations": []}],
    "devices": [{"uuid": "GPU-1", "total_bytes": 85899345920, "free_bytes": 6442450944, "state": "ok"}],
    "lanes": [{"lane": "fast", "in_flight": 0}],
}  # fmt: skip


def call(command: Any, *arguments: str) -> int:
    """Run one command as the command line would."""
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return int(command.run(parser.parse_args(arguments)))


def output(capsys: pytest.CaptureFixture[str], command: Any, *arguments: str) -> str:
    """Standard output of a command that succeeds."""
    assert call(command, *arguments) == 0
    return capsys.readouterr().out


def answer(capsys: pytest.CaptureFixture[str], command: Any, *arguments: str) -> dict[str, Any]:
    """Its JSON."""
    found: dict[str, Any] = json.loads(output(capsys, command, *arguments, "--json"))
    return found


def test_estimate_of_a_catalogue_name(capsys: pytest.CaptureFixture[str]) -> None:
    """The documented fields, with the figures of Qwen2.5-32B at 8K."""
    found = answer(capsys, estimate_command, "Qwen2.5-32B", "--tokens", "8192", "--tp", "2")
    expected = {"engine": "vllm", "kv_dtype": "bf16", "tp": 2, "pp": 1, "tokens": 8192, "sequences": 1, "bytes_per_token": 262144,
                "block_tokens": 16, "blocks": 512, "kv_bytes": 2147483648, "kv_bytes_per_shard": [1073741824] * 2, "state_bytes": 0}  # fmt: skip
    assert {k: found[k] for k in expected} == expected
    assert {"name", "bytes", "formula", "source"} == set(found["terms"][0])
    assert found["total_bytes"] == sum(t["bytes"] for t in found["terms"])


def test_estimate_of_a_model_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """config.json tells the geometry, the files beside it the weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(1000))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(bytes(500))
    found = answer(capsys, estimate_command, str(tmp_path))
    assert (found["bytes_per_token"], found["weights_bytes"]) == (57344, 1500)


def test_estimate_reads_the_index_where_the_files_are_elsewhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """model.safetensors.index.json holds the total."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 15231233024}}))
    assert answer(capsys, estimate_command, str(tmp_path))["weights_bytes"] == 15231233024


def test_estimate_reads_a_separate_quantisation_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """hf_quant_config.json (ModelOpt) names the formats of weights and cache where config.json does not."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    formats = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": formats}))
    found = answer(capsys, estimate_command, str(tmp_path))
    plain, packed = 15_231_233_024, found["weights_bytes"]
    assert packed < 0.45 * plain
    assert found["kv_dtype"] == "fp8"


def test_the_table_names_every_term(capsys: pytest.CaptureFixture[str]) -> None:
    """A person reads terms, a total, the cost of a token, and what to do next."""
    text = output(capsys, estimate_command, "Qwen2.5-7B", "--device", "24GiB")
    for words in (
        "weights",
        "KV cache",
        "activations (peak)",
        "total",
        "A token costs 56.0 KiB",
        "It fits:",
        "kvgate plan",
    ):
        assert words in text


def test_verbose_names_formula_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    """Each term says how it was found and where that comes from."""
    text = output(capsys, estimate_command, "gpt-oss-20b", "-v", "--tokens", "100000")
    assert "12 layers x 8 KV heads x (64 + 64)" in text
    assert "tokens a sequence" in text
    assert "[vllm 0.33.0 v1/core/kv_cache_utils.py" in text
    assert "geometry from PyPI aiconfigurator-core 0.12.0" in text


def test_a_card_that_is_too_small_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The lack is named."""
    assert "It does not fit: a 24.0 GiB card lacks" in output(
        capsys, estimate_command, "Qwen2.5-32B", "--device", "24GiB"
    )


def test_draft_lora_image_and_speculation_are_terms(capsys: pytest.CaptureFixture[str]) -> None:
    """Everything else in memory has a name of its own."""
    found = answer(capsys, estimate_command, "Qwen3-VL-8B-Instruct", "--draft", "Qwen3-0.6B", "--max-loras", "2", "--image", "1024x1024",
                   "--lookahead", "3")  # fmt: skip
    names = {t["name"] for t in found["terms"]}
    assert {"draft_weights", "draft_kv", "lora", "vision_encoder"} <= names
    assert found["tokens"] == 8192 + 1024


def test_llamacpp_rounds_slots_to_256(capsys: pytest.CaptureFixture[str]) -> None:
    """What is allocated at load, as llama.cpp pads it."""
    found = answer(
        capsys, estimate_command, "Llama-3.1-8B", "--engine", "llamacpp", "--tokens", "1000", "--sequences", "2"
    )
    assert found["kv_bytes"] == 2 * 1024 * 131072


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["nosuch-model"], "no such file, directory or catalogue model"),
        (["./nosuch/config.json"], "no such file"),
        (["Qwen2.5-7B", "--tokens", "0"], "--tokens is 0"),
        (["Qwen2.5-7B", "--engine", "exllama"], "known: vllm"),
        (["Qwen2.5-7B", "--kv-dtype", "q9"], "KV type 'q9'"),
        (["Qwen2.5-7B", "--quantization", "q9"], "weight format 'q9'"),
        (["Qwen2.5-7B", "--image", "big"], "1024x768"),
        (["Qwen2.5-7B", "--device", "huge"], "24GiB"),
        (["Qwen2.5-7B", "--image", "0x0"], "1024x768"),
        (["Qwen2.5-7B", "--image", "²x²"], "1024x768"),
        (["Qwen2.5-7B", "--tokens", str(10**30)], "--tokens is .* at most"),
        (["Qwen2.5-7B", "--batched-tokens", "0"], "--batched-tokens is 0"),
        (["Qwen2.5-7B", "--max-num-seqs", "-1"], "--max-num-seqs is -1"),
        (["Qwen2.5-7B", "--block-tokens", "0"], "--block-tokens is 0"),
        (["Qwen2.5-7B", "--lookahead", "-1"], "--lookahead is -1"),
        (["Qwen2.5-7B", "--draft-layers", "9999999999"], "--draft-layers is .* at most 4096"),
        (["Qwen2.5-7B", "--max-loras", "-1"], "--max-loras is -1"),
        (["Qwen2.5-7B", "--lora-rank", "0"], "--lora-rank is 0"),
        (["Qwen2.5-7B", "--tp", "1000000"], "--tp is 1000000"),
        (["Qwen2.5-7B", "--dp", "2"], "a replica of its own"),
        (["Qwen2.5-7B", "--engine-version", "newest"], "holds no number"),
        (["Qwen2.5-7B", "--kv-dtype", "q8_0/"], "KV type ''"),
        (["Qwen2.5-7B", "--device", ""], "--device is empty"),
        ([""], "the model is empty"),
        (["a\nb"], "no such file"),
    ],
)
def test_estimate_refuses_with_one_line(arguments: list[str], match: str) -> None:
    """Every mistake is one line that names it."""
    with pytest.raises((GeometryError, UsageError), match=match) as caught:
        call(estimate_command, *arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"model_type": "llama"}'])
def test_a_broken_config_names_its_file(text: str, tmp_path: Path) -> None:
    """File and field, never a traceback."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(GeometryError, match=r"config\.json"):
        call(estimate_command, str(path))


def test_plan_for_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    """The documented fields for a 24 GiB card."""
    found = answer(capsys, plan_command, "--device", "24GiB", "--model", "CodeLlama-7b", "--engine", "llamacpp", "--quantization", "q4_k_m",
                   "--context", "8192")  # fmt: skip
    assert found["devices"] == [{"total_bytes": 25769803776, "usable_bytes": 25769803776 - 256 * 2**20}]
    row = found["rows"][0]
    expected = {"model": "codellama/CodeLlama-7b-hf", "quantization": "q4_k_m", "engine": "llamacpp", "context_tokens": 8192, "fits": True,
                "kv_bytes_per_sequence": 4294967296, "binding_term": "kv"}  # fmt: skip
    assert {k: row[k] for k in expected} == expected
    assert 0 < row["safe_sequences_70"] <= row["max_sequences"]


def test_plan_of_a_model_in_a_format_of_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What has no row among the formats is planned by its files' size, under its own name."""
    config = CONFIG | {"quantization_config": {"quant_method": "exl3", "bits": 3.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(GeometryError, match="field 'quantization_config' names 'exl3'"):
        call(plan_command, "--device", "24GiB", "--model", str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))
    found = answer(capsys, plan_command, "--device", "24GiB", "--model", str(tmp_path))
    assert {(row["quantization"], row["weights_bytes"]) for row in found["rows"]} == {("exl3", 5000)}


def test_plan_answers_why_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    """A person reads the reason and a way out."""
    text = output(capsys, plan_command, "--device", "24GiB", "--model", "Qwen2.5-14B", "--quantization", "bf16")
    assert "Nothing of this fits." in text
    assert (
        "weights take 27.5 GiB of 22.1 GiB usable a device: 5.4 GiB missing. Would fit: weights in fp8, or 2 such devices."
        in text
    )


def test_plan_without_models_shows_the_usual_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """2 x 80 GiB: large models fit, the safe concurrency is a column."""
    text = output(capsys, plan_command, "--device", "80GiBx2")
    assert "SAFE AT 70 %" in text
    assert "Llama-3.3-70B-Instruct" in text.partition("Does not fit:")[0]


def test_plan_verbose_names_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the figures come from."""
    assert "determine_available_memory" in output(
        capsys, plan_command, "--device", "24GiB", "--model", "Qwen3-8B", "-v"
    )


def test_reserves_and_mps_limits_shrink_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    """What others hold is not planned."""
    found = answer(
        capsys, plan_command, "--device", "80GiB", "--model", "Qwen3-8B", "--reserve", "2GiB", "--mps-limit", "40GiB"
    )
    assert found["devices"][0]["usable_bytes"] == 40 * 2**30 - 2 * 2**30 - 256 * 2**20


def test_plan_of_a_configuration_on_a_card(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The file's local targets with its own weights, format and context."""
    path = tmp_path / "kvgate.yaml"
    path.write_text(KVGATE)
    rows = answer(capsys, plan_command, "-c", str(path), "--device", "48GiB")["rows"]
    assert [(r["weights_bytes"], r["context_tokens"], r["quantization"], r["fits"]) for r in rows] == [
        (19_300_000_000, 32768, "awq", True)
    ]


def test_plan_of_a_given_fleet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Free blocks of the replicas of STATE.json without the watermark, in sequences of full context."""
    config, state = tmp_path / "kvgate.yaml", tmp_path / "STATE.json"
    config.write_text(KVGATE)
    state.write_text(json.dumps(STATE))
    found = answer(capsys, plan_command, "-c", str(config), "--state", str(state))
    row = found["rows"][0]
    assert (row["replica"], row["model"], row["max_sequences"], row["binding_term"]) == (
        "gpu-a-0",
        "primary-32b",
        1,
        "kv",
    )
    assert found["devices"] == [{"total_bytes": 85899345920, "usable_bytes": 6442450944 - 256 * 2**20}]


@pytest.mark.parametrize(
    ("command", "words", "line"),
    [
        (plan_command, ["--device", "24"], "plan: --device: 24 what? write 24GiB"),
        (plan_command, ["--device", "24x2"], "plan: --device: 24 what? write 24GiB"),
        (plan_command, ["--device", "24GiB", "--reserve", "2"], "plan: --reserve: 2 what? write 2GiB"),
        (estimate_command, ["Qwen3-8B", "--device", "24"], "estimate: --device: 24 what? write 24GiB"),
        (estimate_command, ["Qwen3-8B", "--weights", "18.6"], "estimate: --weights: 18.6 what? write 18.6GiB"),
        (
            plan_command,
            ["--device", "24GiB", "--state", "s"],
            "plan: --state is a fleet: give it with -c and without --device",
        ),
        (estimate_command, [], "estimate: name a model, or see the catalogue: kvgate estimate --list"),
    ],
)
def test_what_is_half_said_is_asked_back(
    capsys: pytest.CaptureFixture[str], command: Any, words: list[str], line: str
) -> None:
    """A size without a unit is not taken for bytes, and a model is not guessed."""
    assert call(command, *words) == 2
    assert capsys.readouterr().err == line + "\n"


def test_the_catalogue_can_be_listed_and_is_named_where_a_name_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt name meets the names close to it and the way to see all."""
    assert call(estimate_command, "--list") == 0
    assert "Qwen/Qwen3-8B" in capsys.readouterr().out.splitlines()
    with pytest.raises(GeometryError, match=r"qwenn38b: .*; close: .*Qwen3-8B.*; all names: kvgate estimate --list"):
        call(estimate_command, "qwenn38b")
    with pytest.raises(GeometryError, match=r"close: Qwen/Qwen3-8B,"):
        call(estimate_command, "qwen3-8")


def test_plan_needs_a_card_or_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage is exit status 2 and one line."""
    assert call(plan_command) == 2
    assert capsys.readouterr().err == "plan: name a card (--device 24GiB) or a configuration (-c kvgate.yaml)\n"


@pytest.mark.parametrize("arguments", [["--device", "24GiB", "--context", "0"], ["--device", "24GiB", "--mean-tokens", "0"],
                                       ["--device", "24GiB", "--model", "nosuch"], ["-c", "nosuch.yaml"],
                                       ["--device", "24GiB", "--utilization", "nan"], ["--device", "24GiB", "--utilization", "inf"],
                                       ["--device", "24GiB", "--utilization", "0"], ["--device", "24GiB", "--utilization", "5"],
                                       ["--device", "24GiB", "--kv-dtype", "q9"], ["--device", "24GiB", "--model", ""],
                                       ["--device", "24GiB", "--context", str(10**20)],
                                       ["--device", "9" * 400 + "GiB"], ["--device", "24GiBx" + "9" * 5000],
                                       ["--device", "1GiB", "--reserve", "9" * 5000 + "GiB"]])  # fmt: skip
def test_plan_refuses_with_one_line(arguments: list[str]) -> None:
    """Every mistake is one line."""
    with pytest.raises((GeometryError, UsageError, ConfigError)) as caught:
        call(plan_command, *arguments)
    assert "\n" not in str(caught.value)


def test_attention_data_parallelism_spreads_weights_not_requests(capsys: pytest.CaptureFixture[str]) -> None:
    """The weights lie on all eight devices, one request's KV on one of them."""
    found = answer(capsys, estimate_command, "DeepSeek-V3", "--engine", "sglang", "--tp", "8", "--dp", "8")
    assert (len(found["kv_bytes_per_shard"]), len(found["bytes_per_device"])) == (1, 8)
    assert found["bytes_per_device"][0] - found["bytes_per_device"][1] == found["kv_bytes"]


def test_estimate_says_what_the_engine_would_refuse_first(capsys: pytest.CaptureFixture[str]) -> None:
    """A split that heads do not divide by, a prompt beyond the model's context and an unknown image rule are said."""
    text = output(
        capsys,
        estimate_command,
        "Qwen3-8B",
        "--tokens",
        "60000",
        "--tp",
        "3",
        "--image",
        "640x480",
        "--device",
        "24GiB",
    )
    assert "The model was made for 40960 tokens; 76384 need an extended context." in text
    assert "vllm does not start this: 32 attention heads do not divide by 3." in text
    assert "No image rule is known for this model" in text
    assert "--device names 1 card, the load is spread over 3; set --tp 1 or name 3 cards." in text


@pytest.mark.parametrize("command", [estimate_command, plan_command])
def test_a_word_for_a_number_is_two_lines(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The usage line points to --help and does not list every option."""
    with pytest.raises(SystemExit):
        call(command, "--bogus")
    assert len(capsys.readouterr().err.splitlines()) == 2


def _model(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_weights_that_lie_there_twice_count_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """consolidated.safetensors holds the same weights as model-*.safetensors."""
    folder = _model(tmp_path)
    for name in ("model-00001-of-00001.safetensors", "consolidated.safetensors"):
        (folder / name).write_bytes(bytes(5000))
    assert answer(capsys, estimate_command, str(folder))["weights_bytes"] == 5000


def test_a_pointer_stands_for_its_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A clone without git-lfs holds 130-byte pointers; the size inside counts."""
    folder = _model(tmp_path)
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 15231233024\n"
    )
    assert answer(capsys, estimate_command, str(folder))["weights_bytes"] == 15231233024


@pytest.mark.parametrize("total", ["NaN", '"12"', "-1", "true"])
def test_a_broken_index_names_its_field(total: str, tmp_path: Path) -> None:
    """A total that is no number of bytes is an error."""
    folder = _model(tmp_path)
    (folder / "model.safetensors.index.json").write_text(f'{{"metadata": {{"total_size": {total}}}}}')
    with pytest.raises(GeometryError, match=r"metadata\.total_size"):
        call(estimate_command, str(folder))


def test_json_without_a_bottom_is_one_line(tmp_path: Path) -> None:
    """A file that nests 100,000 lists is not readable, and nothing more happens."""
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(GeometryError, match="not readable as JSON"):
        call(estimate_command, str(path))


@pytest.mark.parametrize(
    ("engine", "kv_type", "said"),
    [("vllm", "q8_0", "vllm has no KV type q8_0, which is llama.cpp's."), ("ollama", "fp8", "ollama has no KV type fp8"),
     ("llamacpp", "q8_0/q4_0", None), ("vllm", "fp8", None), ("sglang", "auto", None)],
)  # fmt: skip
def test_a_foreign_kv_type_is_said(
    engine: str, kv_type: str, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A type that the engine does not have is computed and named as such."""
    text = output(capsys, estimate_command, "Qwen3-8B", "--engine", engine, "--kv-dtype", kv_type)
    assert ("has no KV type" in text) is (said is not None)
    assert (said or "") in text
