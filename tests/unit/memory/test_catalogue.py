"""The shipped catalogue: every row is sourced, readable and found by the names people use."""

from __future__ import annotations

import re

import pytest

from extproc.errors import GeometryError
from extproc.memory import ENGINES, build_kv_model, catalogue_names, catalogue_row, engine_rules, load_geometry

#: A repository path with its commit, or a package with its version, and the path inside.
SOURCE = re.compile(r"GitHub [\w.-]+/[\w.-]+@[0-9a-f]{40}: \S.*|PyPI [\w.-]+ \d[\w.]*: \S.*")


def test_at_least_sixty_models() -> None:
    """The catalogue covers what coding and chat teams run."""
    assert len(catalogue_names()) >= 60


@pytest.mark.parametrize("name", catalogue_names())
def test_every_row_cites_the_public_file_it_was_read_from(name: str) -> None:
    """Repository path and commit, or package and version."""
    row = catalogue_row(name)
    assert row is not None
    assert SOURCE.fullmatch(str(row["source"]))


@pytest.mark.parametrize("name", catalogue_names())
def test_every_row_costs_something_on_every_engine(name: str) -> None:
    """A row parses by the same rules as a file and gives a cost on each engine."""
    geometry = load_geometry(name)
    assert geometry.context_tokens > 0
    for engine in ENGINES:
        kv = build_kv_model(geometry, engine_rules(engine))
        assert kv.bytes_per_token > 0
        assert kv.blocks(1000) > 0


#: Llama 4 is named by its active parameters.
SIZED = [n for n in catalogue_names() if re.search(r"(?<![\w.])(\d+(?:\.\d+)?)[bB](?![\w])", n) and "Llama-4" not in n]


@pytest.mark.parametrize("name", SIZED)
def test_parameters_agree_with_the_size_in_the_name(name: str) -> None:
    """Counted parameters are near the size a model is named by: a wrong width or layer count would not be."""
    geometry = load_geometry(name)
    if geometry.params is None:
        assert geometry.model_type == "nemotron-nas"  # feed-forward sizes per layer are not in the row
        return
    named = max(float(m) for m in re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)[bB](?![\w])", name))
    assert 0.8 * named < geometry.params.total / 1e9 < 1.35 * named


@pytest.mark.parametrize(
    "spelling", ["Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2.5-coder-32b-instruct", "Qwen2.5-Coder-32B"]
)
def test_models_are_found_by_any_usual_spelling(spelling: str) -> None:
    """Full name, last part, alias, in any case."""
    assert load_geometry(spelling).name == "Qwen/Qwen2.5-Coder-32B-Instruct"


def test_an_unknown_name_suggests_close_ones() -> None:
    """The error helps."""
    with pytest.raises(GeometryError, match=r"Qwen2\.5-Coder-33B: no such file.*close: .*Qwen2\.5-Coder"):
        load_geometry("Qwen2.5-Coder-33B")


def test_spellings_are_not_ambiguous() -> None:
    """No alias of one row is the name of another."""
    names = {n.lower() for n in catalogue_names()}
    for name in catalogue_names():
        row = catalogue_row(name)
        assert row is not None
        aliases = row.get("aliases", [])
        assert isinstance(aliases, list)
        assert not {str(a).lower() for a in aliases} & (names - {name.lower()})
