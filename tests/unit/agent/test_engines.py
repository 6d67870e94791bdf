"""Every engine row against bodies of real releases: one folder of ``tests/data/metrics`` per release and setting."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from extproc.agent.engines import ENGINES
from extproc.agent.engines.base import Answer, Hints

DATA = Path(__file__).parents[2] / "data" / "metrics"
CASES = sorted(path.parent.name for path in DATA.glob("*/case.json"))


def load(name: str) -> tuple[dict[str, Any], dict[str, Answer]]:
    """A case's description and its answers."""
    case = json.loads((DATA / name / "case.json").read_text())
    answers = {
        path: Answer(entry["status"], (DATA / name / entry["file"]).read_bytes())
        for path, entry in case["answers"].items()
    }
    return case, answers


def jsonable(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    return json.loads(json.dumps(value, default=str))


@pytest.mark.parametrize("name", CASES)
def test_reading_equals_the_expected_one(name: str) -> None:
    """Every figure the case states is read as stated, and unknown stays None."""
    case, answers = load(name)
    reading = ENGINES[case["engine"]].read(answers, Hints(**case["hints"]))
    read = jsonable(asdict(reading))
    expected = case["expected"]
    counters = expected.pop("counters", {})
    assert {key: read[key] for key in expected} == expected
    assert {key: read["counters"][key] for key in counters} == counters
    assert reading.bad_lines == 0


def test_enough_releases_come_from_engines_or_named_sources() -> None:
    """At least ten bodies are recorded, or built from a repository's definitions with path and commit."""
    kinds: Counter[str] = Counter()
    for name in CASES:
        source = load(name)[0]["source"]
        kinds[source["kind"]] += 1
        if source["kind"] == "built":
            assert len(source["commit"]) == 40
            assert "/" in source["repository"]
            assert source["path"]
    assert kinds["recorded"] + kinds["built"] >= 10


@pytest.mark.parametrize("name", CASES)
def test_every_endpoint_of_the_row_is_in_the_case(name: str) -> None:
    """A case answers what the row asks, so that a new endpoint does not go untested."""
    case, answers = load(name)
    assert set(answers) == {endpoint.path for endpoint in ENGINES[case["engine"]].endpoints}


def vllm_reading(labels: str, max_model_tokens: int, extra: str = "", **hints: int) -> Any:
    """vLLM's row over one engine with these cache_config_info labels, a quarter of its pool in use."""
    body = (
        f"vllm:cache_config_info{{{labels}}} 1\nvllm:kv_cache_usage_perc 0.25\n"
        f"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n{extra}"
    )
    models = json.dumps({"data": [{"id": "m", "max_model_len": max_model_tokens}]}).encode()
    answers = {"/health": Answer(200), "/metrics": Answer(200, body.encode()), "/v1/models": Answer(200, models)}
    return ENGINES["vllm"].read(answers, Hints(**hints))


def test_a_hybrids_pool_is_concurrency_times_context() -> None:
    """544-token label, 1,001 blocks, 6.0 requests of 131,072: the pool is 786,432 tokens less the null block's share."""
    labels = 'block_size="544",num_gpu_blocks="1001",kv_cache_max_concurrency="6.0"'
    reading = vllm_reading(labels, 131_072)
    tokens = 6.0 * 131_072 * 1000 / 1001
    assert reading.capacity_blocks == int(tokens) // 544
    assert reading.used_blocks == -(-reading.capacity_blocks // 4)
    assert reading.notes == ("hybrid_pool: from kv_cache_max_concurrency",)


@pytest.mark.parametrize("factor", [1, 2, 8])
def test_context_parallelism_follows_from_the_concurrency(factor: int) -> None:
    """Blocks are local; a block holds block_size x factor tokens of a request."""
    concurrency = 5001 / -(-32_768 // (16 * factor))
    labels = f'block_size="16",num_gpu_blocks="5001",kv_cache_max_concurrency="{concurrency}"'
    reading = vllm_reading(labels, 32_768)
    assert (reading.capacity_blocks, reading.block_tokens, reading.used_blocks) == (5000, 16 * factor, 1250)


def test_a_stated_pool_does_not_overrule_what_the_engine_reports() -> None:
    """kvTokens that is no whole multiple of the reported pool is not believed."""
    reading = vllm_reading('block_size="16",num_gpu_blocks="1001"', 8192, kv_tokens=50_000)
    assert (reading.capacity_blocks, reading.block_tokens) == (1000, 16)


def test_adapters_and_waiting_reasons_are_remarks() -> None:
    """The newest set of adapters counts, since vLLM leaves the old series standing."""
    extra = (
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="old",waiting_lora_adapters=""} 100\n'
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="new",waiting_lora_adapters="x"} 200\n'
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 3\n'
        'vllm:num_requests_waiting_by_reason{reason="deferred"} 0\n'
    )
    reading = vllm_reading('block_size="16",num_gpu_blocks="1001"', 8192, extra)
    assert reading.notes == ("lora: running [new], waiting [x], at most 2", "waiting_capacity: 3")


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_nothing_answered_is_unknown_and_never_zero(name: str) -> None:
    """A row without a single answer reports no capacity, no use and no counts."""
    reading = ENGINES[name].read({}, Hints())
    assert (reading.capacity_blocks, reading.used_blocks, reading.running, reading.waiting) == (None,) * 4
    assert reading.availability == "unhealthy"


@pytest.mark.parametrize("name", sorted(ENGINES))
@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b'{"data": 3}', b'{"models": [1, null]}', b"\xff\xfe", b"[" * 9999]
)
def test_nonsense_answers_are_read_without_an_exception(name: str, body: bytes) -> None:
    """Whatever 200 brings, the row returns a reading and invents no capacity but Ollama's default."""
    row = ENGINES[name]
    reading = row.read({endpoint.path: Answer(200, body) for endpoint in row.endpoints}, Hints())
    assert reading.capacity_blocks in (None, 4096)
    assert reading.used_blocks is None


@pytest.mark.parametrize(("override", "expected"), [("None", 1_048_576), ("512", None)])
def test_bytes_per_block_only_where_the_pool_is_the_real_one(override: str, expected: int | None) -> None:
    """An overridden block count leaves the asked size in the label, which says nothing about a block."""
    labels = (
        f'block_size="32",num_gpu_blocks="1024",num_gpu_blocks_override="{override}",kv_cache_memory_bytes="1073741824"'
    )
    assert vllm_reading(labels, 8192).kv_bytes_per_block == expected


@pytest.mark.parametrize(
    ("slots", "hints", "pool", "note"),
    [
        # Slots of different sizes (seen after a slot was given more): only the smallest is sure for every request.
        ([4096, 2048], {}, 2048, "pool_assumed_unified: taken as 2048 cells; if slots are split, set kvTokens: 4096"),
        ([4096, 4096], {"kv_tokens": 8192}, 8192, None),
        ([4096, 4096], {"kv_tokens": 99_999}, 4096, "kv_tokens_ignored: 99999 is not within 4096..8192; "),
        ([4096], {}, 4096, None),
    ],
)
def test_llamacpp_pool(slots: list[int], hints: dict[str, int], pool: int, note: str | None) -> None:
    """The smaller reading of the cache, unless the operator states one that can be true."""
    props = {"total_slots": len(slots), "default_generation_settings": {"n_ctx": max(slots)}}
    answers = {
        "/health": Answer(200),
        "/props": Answer(200, json.dumps(props).encode()),
        "/slots": Answer(200, json.dumps([{"id": n, "n_ctx": size} for n, size in enumerate(slots)]).encode()),
        "/metrics": Answer(200, b"llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\n"),
    }
    reading = ENGINES["llamacpp"].read(answers, Hints(**hints))
    assert (reading.capacity_blocks, reading.max_model_tokens) == (pool, min(slots))
    assert [text.startswith(note or "?") for text in reading.notes] == ([True] if note else [])
