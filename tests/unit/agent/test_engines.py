"""Every engine row against bodies of real releases: one folder of ``tests/data/metrics`` per release and setting."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from extproc.agent.discovery import endpoints_of
from extproc.agent.engines import ENGINES
from extproc.agent.engines.base import Answer, Hints
from extproc.config.models import Config

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


def vllm_reading(labels: str, max_model_tokens: int, extra: str = "", **hints: Any) -> Any:
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
    assert reading.notes == (
        "hybrid_pool: from kv_cache_max_concurrency; name a geometry to count short requests exactly",
    )


def geometry(model: str, tp: int = 1) -> dict[str, Any]:
    """Hints for a model whose geometry the catalogue has, as the configuration gives them."""
    target = {"model": "m", "engine": "vllm", "tensorParallel": tp, "replicas": [{"name": "r", "url": "http://h:1"}]}
    config = Config.model_validate({"models": {"m": {"geometry": model}}, "targets": {"t": target}})
    hints = endpoints_of(config)[0].hints
    return {"kv": hints.kv, "by_geometry": hints.by_geometry}


#: vllm#40691: Qwen3.5-27B with 32,768 context; blocks, block size and concurrency (33.04) are the log's.
QWEN35 = 'block_size="784",num_gpu_blocks="1487",kv_cache_max_concurrency="{}"'


def test_a_hybrid_with_a_geometry_is_counted_in_the_engines_own_blocks() -> None:
    """42 blocks of attention and 2 in each of 3 groups of states: 48 a full request, 7 a short one."""
    hints = geometry("Qwen/Qwen3.5-27B")
    reading = vllm_reading(QWEN35.format(1487 / 48), 32_768, **hints)
    assert (reading.capacity_blocks, reading.block_tokens, reading.notes) == (1486, 784, ())
    assert reading.formula_ratio == pytest.approx(1.0)
    assert (hints["kv"](784).charged_blocks(32_768), hints["kv"](784).blocks(100)) == (48, 7)
    # In tokens the pool has 1,293 such blocks of which a short request takes one: six times as many as fit.
    assert vllm_reading(QWEN35.format(1487 / 48), 32_768).capacity_blocks == 1293


def test_an_engine_that_fits_fewer_than_the_geometry_wins() -> None:
    """A wrong geometry must not promise room that is not there: the pool shrinks and the drift is told."""
    reading = vllm_reading(QWEN35.format(1487 / 96), 32_768, **geometry("Qwen/Qwen3.5-27B"))
    assert (reading.capacity_blocks, reading.formula_ratio) == (743, pytest.approx(0.5))
    assert reading.notes[0].startswith("formula_drift: max concurrency: engine 15.4896, formula 30.9792")


def test_an_engine_that_fits_more_than_the_geometry_is_only_told() -> None:
    """The log's engine keeps one state a group where we assume two: that wastes room and is safe, so the count stays."""
    reading = vllm_reading(QWEN35.format("33.04"), 32_768, **geometry("Qwen/Qwen3.5-27B"))
    assert (reading.capacity_blocks, reading.notes[0][:13]) == (1486, "formula_drift")
    assert reading.formula_ratio == pytest.approx(1.067, abs=0.001)


def test_a_uniform_models_geometry_agrees() -> None:
    """Qwen2.5-Coder-32B: 20,001 blocks of 16, 32,768 context."""
    labels = f'block_size="16",num_gpu_blocks="20001",kv_cache_max_concurrency="{20001 / 2048}"'
    reading = vllm_reading(labels, 32_768, **geometry("Qwen/Qwen2.5-Coder-32B-Instruct"))
    assert (reading.capacity_blocks, reading.formula_ratio, reading.notes) == (20_000, 1.0, ())


def test_a_geometry_that_this_host_cannot_read_keeps_the_unit() -> None:
    """Requests are counted by it elsewhere, so the engine's own blocks are reported here too."""
    reading = vllm_reading(QWEN35.format("33.04"), 32_768, by_geometry=True)
    assert (reading.capacity_blocks, reading.block_tokens) == (1486, 784)


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


def trtllm(used: int, finished: int) -> float | None:
    """Progress of trtllm-serve as its metrics tell it."""
    body = (
        f"trtllm_num_requests_running 1\ntrtllm_kv_cache_used_blocks {used}\ntrtllm_kv_cache_max_blocks 100\n"
        f"trtllm_request_success_total {finished}\n"
    )
    reading = ENGINES["trtllm"].read(
        {"/health": Answer(200), "/prometheus/metrics": Answer(200, body.encode())}, Hints()
    )
    assert reading.wedged_after_s == 60.0
    return reading.counters.progress


def test_trtllm_serve_shows_by_its_blocks_that_it_moves() -> None:
    """It counts no iterations: blocks that grow, and one answer that ends as another grows, are both movement."""
    assert trtllm(10, 5) == trtllm(10, 5) is not None
    assert len({trtllm(10, 5), trtllm(11, 5), trtllm(9, 6), trtllm(10, 6)}) == 4


@pytest.mark.parametrize("value", ["1.7e308", "-1.7e308", "NaN", "+Inf", "9" * 400])
@pytest.mark.parametrize(
    "series",
    [
        ("vllm", "vllm:prompt_tokens_total"),
        ("vllm", "vllm:generation_tokens_total"),
        ("vllm", "vllm:num_requests_running"),
        ("sglang", "sglang:num_retracted_requests_total"),
        ("sglang", "sglang:prompt_tokens_total"),
        ("tgi", "tgi_batch_inference_count"),
        ("llamacpp", "llamacpp:n_decode_total"),
        ("trtllm", "trtllm_request_success_total"),
    ],
    ids=str,
)
def test_figures_that_no_engine_has_are_unknown(series: tuple[str, str], value: str) -> None:
    """Several of them add up to what no float holds; it is told as unknown, and every figure told is a sane one."""
    kind, name = series
    body = "".join(f'{name}{{engine="{n}",dp_rank="{n}",model="{m}"}} {value}\n' for n in range(2) for m in "ab")
    row = ENGINES[kind]
    answers = {e.path: Answer(200, body.encode() if e.metrics else b"{}") for e in row.endpoints}
    reading = row.read(answers, Hints())
    figures = [reading.running, reading.waiting, *asdict(reading.counters).values()]
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures if figure is not None)


def test_numbers_in_json_that_no_float_holds_are_unknown() -> None:
    """A slot's figures may be any JSON number."""
    slots = json.dumps([{"id": 0, "n_ctx": 4096, "is_processing": True, "n_prompt_tokens_processed": 10**400,
                         "next_token": [{"n_decoded": 10**400}]}])  # fmt: skip
    props = json.dumps({"total_slots": 10**400, "default_generation_settings": {"n_ctx": 4096}})
    answers = {"/health": Answer(200), "/slots": Answer(200, slots.encode()), "/props": Answer(200, props.encode())}
    reading = ENGINES["llamacpp"].read(answers, Hints())
    assert (reading.capacity_blocks, reading.running, reading.counters.progress) == (4096, 1, None)


@pytest.mark.parametrize("name", ["llamacpp", "ollama", "vllm", "sglang", "tgi"])
def test_a_page_in_the_engines_place_is_no_engine(name: str) -> None:
    """A proxy's or a portal's page with status 200, even where the operator states the pool."""
    page = b"<!DOCTYPE html><html><body>Sign in</body></html>"
    row = ENGINES[name]
    reading = row.read({e.path: Answer(200, page) for e in row.endpoints}, Hints(kv_tokens=8192, max_sequences=4))
    assert reading.availability == "unhealthy" or reading.missing


def test_a_data_parallel_engine_that_shows_nothing_is_unknown() -> None:
    """It is named by its configuration, so its room and its load are unknown, not absent."""
    extra = 'vllm:cache_config_info{engine="1",block_size="16",num_gpu_blocks="1001"} 1\n'
    reading = vllm_reading('engine="0",block_size="16",num_gpu_blocks="1001"', 8192, extra)
    assert {"used", "running", "waiting"} <= set(reading.missing)


@pytest.mark.parametrize("order", [("None", "1001"), ("1001", "None"), ("5001", "1001"), ("1001", "5001")])
def test_of_several_sizes_for_one_engine_the_smallest_known_counts(order: tuple[str, str]) -> None:
    """A size that was told late, or again, leaves the old series in place."""
    extra = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{order[1]}",late="1"}} 1\n'
    reading = vllm_reading(f'block_size="16",num_gpu_blocks="{order[0]}"', 8192, extra)
    assert reading.capacity_blocks == 1000
