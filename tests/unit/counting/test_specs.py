"""What a counter is made from: the model's files, its geometry, and the engine that it stands for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from extproc.config import load
from extproc.counting import Counting
from extproc.counting.specs import load_specs, specs_of
from extproc.errors import ConfigError
from extproc.tokens.overheads import FAMILIES
from tests.payloads.tokenizers import tokenizer_dir

QWEN_VL = tokenizer_dir("qwen2-vl-2b-instruct-awq")

VISION = {
    "model_type": "qwen2_vl",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def configuration(folder: Path, model: str, *engines: str) -> Path:
    """A file with one model and a target on each of these engines."""
    targets = "".join(
        f"  t{n}: {{engine: {engine}, model: m, replicas: [{{name: r{n}, url: 'http://127.0.0.1:{9000 + n}'}}]}}\n"
        for n, engine in enumerate(engines)
    )
    path = folder / "kvgate.yaml"
    path.write_text(
        f"models:\n  m: {{{model}}}\ntargets:\n{targets}lanes:\n  a: {{targets: [t0], maxOutputTokens: 9}}\n"
    )
    return path


def test_engines_of_one_model_share_its_vocabulary(tmp_path: Path) -> None:
    """Only vLLM's handling of messages is followed; the files are read once all the same."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QWEN_VL / name, tmp_path)
    specs = specs_of(load(str(configuration(tmp_path, "tokenizer: tokenizer.json", "vllm", "llamacpp", "vllm"))))
    assert [spec.followed for spec in specs.values()] == [True, False, True]
    loaded = load_specs(specs.values())
    ours, theirs = loaded[specs["t0"]], loaded[specs["t1"]]
    assert (ours.followed, theirs.followed) == (True, False)
    assert ours.vocabulary is theirs.vocabulary


def test_the_geometry_names_the_vision_family_and_the_model_type(tmp_path: Path) -> None:
    """Without a config.json beside the tokenizer."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(VISION))
    config = load(str(configuration(tmp_path, "geometry: ./model", "vllm")))
    spec = specs_of(config)["t0"]
    assert (spec.vision_family, spec.model_type) == ("qwen2_vl", "qwen2_vl")
    family = load_specs([spec])[spec].pictures.family
    assert family is not None
    assert family.name == "qwen2_vl"


def test_the_template_keys_reach_the_counter(tmp_path: Path) -> None:
    """Family and the operator's figure."""
    config = load(str(configuration(tmp_path, "templateFamily: gemma, templateOverheadTokens: 77", "vllm")))
    spec = specs_of(config)["t0"]
    found = load_specs([spec])[spec].overhead
    assert (found.fixed, found.per_message) == (77, FAMILIES["gemma"].per_message)


def test_a_template_and_a_family_contradict_each_other(tmp_path: Path) -> None:
    """One line names the key and the mend; an unknown family is an error too."""
    with pytest.raises(ConfigError, match=r"templateFamily: it stands in for a template.*remove one"):
        load(str(configuration(tmp_path, "chatTemplate: a.jinja, templateFamily: chatml", "vllm")))
    with pytest.raises(ConfigError, match="templateFamily"):
        load(str(configuration(tmp_path, "templateFamily: vicuna", "vllm")))


def test_a_file_that_cannot_be_used_is_one_line_per_model(tmp_path: Path) -> None:
    """However many engines the model has."""
    (tmp_path / "tokenizer.json").write_text("{")
    config = load(str(configuration(tmp_path, "tokenizer: tokenizer.json", "vllm", "llamacpp")))
    with pytest.raises(ConfigError) as caught:
        Counting.from_config(config)
    assert len(caught.value.problems) == 1
    assert "models.m.tokenizer" in caught.value.problems[0]
