"""Loading: YAML as people write it, bounded; paths from the file's directory; every mistake one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.config import Config, load, load_text
from extproc.counting import Counting
from extproc.errors import ConfigError
from extproc.local import effective
from extproc.local.tls_proxy import CERTIFICATE

TARGETS = """
targets:
  t: {engine: vllm, model: m, replicas: [{name: r, url: "http://127.0.0.1:1"}]}
  far: {engine: openai, url: "https://api.example.com"}
lanes: {a: {}}
"""


def problems(text: str) -> list[str]:
    """The lines that loading ``text`` ends with."""
    with pytest.raises(ConfigError) as caught:
        load_text(text, where="k.yaml")
    return caught.value.problems


def written(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "k.yaml"
    path.write_text(text)
    return path


# -- YAML


def test_a_key_beside_a_merge_overrides_it() -> None:
    """The ordinary way of writing variants with anchors."""
    config = load_text(
        "lanes:\n  a: &b {maxInputTokens: 5, concurrency: 2}\n  c: {<<: *b, maxInputTokens: 7}\n"
        "  d: {maxInputTokens: 9, <<: *b}\n",
        where="k",
    )

    assert {name: lane.max_input_tokens for name, lane in config.lanes.items()} == {"a": 5, "c": 7, "d": 9}
    assert {lane.concurrency for lane in config.lanes.values()} == {2}


def test_a_merged_mapping_with_an_override_is_no_duplicate_either() -> None:
    """A merge of a merge, whatever order the constructor visits them in."""
    config = load_text(
        "lanes: &all\n  a: &a {maxInputTokens: 5}\n  b: &b {<<: *a, maxInputTokens: 6}\n  c: {<<: [*b, *a], concurrency: 1}\n",
        where="k",
    )

    assert config.lanes["b"].max_input_tokens == 6
    assert config.lanes["c"].max_input_tokens == 6  # the first of a list goes before the others


@pytest.mark.parametrize("merged", ["1", "[1]", "[[{a: 1}]]"])
def test_only_mappings_can_be_merged(merged: str) -> None:
    """The line says where."""
    (line,) = problems(f"lanes: {{<<: {merged}}}")

    assert "line 1" in line


@pytest.mark.parametrize(
    "text",
    ["lanes: {a: {}, a: {}}", "lanes: {a: &b {}, c: {<<: *b, concurrency: 1, concurrency: 2}}", "lanes: {}\nlanes: {}"],
)
def test_a_key_written_twice_is_refused(text: str) -> None:
    """YAML would keep the last one silently."""
    (line,) = problems(text)

    assert "stands twice" in line
    assert line.startswith("k.yaml: line ")


def test_aliases_that_multiply_stay_small() -> None:
    """Nine levels of ten aliases each, as values and as merges, load or fail at once."""
    values = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    merges = ["lanes:", "  l0: &m0 {concurrency: 1, maxInputTokens: 1}"]
    for level in range(1, 9):
        before, now = "abcdefghi"[level - 1], "abcdefghi"[level]
        values.append(f"{now}: &{now} [{', '.join([f'*{before}'] * 10)}]")
        merges.append(f"  l{level}: &m{level} {{<<: [{', '.join([f'*m{level - 1}'] * 10)}]}}")

    assert len(problems("\n".join(values))) == 9
    assert len(load_text("\n".join(merges), where="k").lanes) == 9


def test_an_alias_to_itself_is_one_line() -> None:
    """Recursive data cannot be a configuration."""
    assert len(problems("lanes: &a {x: *a}")) == 1


# -- values


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("targets.t.adapters.0", 'targets: {t: {engine: vllm, adapters: ["a\\nb"]}}'),
        ("targets.t.servedModel", 'targets: {t: {engine: vllm, servedModel: "a\\u0007"}}'),
        ("aliases.", 'lanes: {a: {}}\naliases: {"": {lane: a, targets: [t]}}'),
        ("laneHeader.name", "lanes: {a: {}}\nlaneHeader: {name: x-kvgate-lane, trustedCidrs: [10.0.0.0/8]}"),
        ("laneHeader.trustedCidrs.0", "lanes: {a: {}}\nlaneHeader: {name: x-lane, trustedCidrs: [10.0.0.1/8]}"),
        (
            "targets.t.auth.inject.header",
            "targets: {t: {engine: openai, auth: {inject: {secretEnv: K, header: host}}}}",
        ),
        (
            "targets.t.auth.inject.prefix",
            'targets: {t: {engine: openai, auth: {inject: {secretEnv: K, prefix: "a\\n"}}}}',
        ),
        ("targets.t.url", 'targets: {t: {engine: openai, url: "http://[:::::]:70"}}'),
        ("freshness.freshS", "lanes: {a: {}}\nfreshness: {freshS: .inf}"),
        ("freshness.unknownS", "lanes: {a: {}}\nfreshness: {unknownS: .nan}"),
        ("targets.t.watermark", "targets: {t: {engine: vllm, watermark: .nan}}"),
        ("envoy.streamIdleTimeoutS", "lanes: {a: {}}\nenvoy: {streamIdleTimeoutS: 9007199254740992}"),
        ("serve.admin", 'lanes: {a: {}}\nserve: {admin: "unix:/run/x"}'),
        ("serve.admin", 'lanes: {a: {}}\nserve: {admin: "127.0.0.1:99999"}'),
        ("models.m.tokenizer", 'lanes: {a: {}}\nmodels: {m: {tokenizer: ""}}'),
    ],
)
def test_a_value_that_nobody_could_use_is_refused_at_its_path(key: str, text: str) -> None:
    """One line with file and path, which fits a terminal."""
    (line,) = [line for line in problems(text) if line.startswith(f"k.yaml: {key}")]

    assert len(line) < 220


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://h:1",
        "redis://h:1/abc",
        "redis://h:port",
        "redis://h:99999",
        "redis://[::1",
        "redis://a..b:1",
        "unix://tmp/x",
        "unix:///",
        "redis://h/-1",
        "redis+cluster://h:1/3",
        "rediss://h?ca=/no/such/file.pem",
        "rediss://h?cafile=/etc/ssl/certs/ca-certificates.crt",
        "redis://h:1?db=2",
        "redis://h:1/0/2",
        "redis://h:1/0#x",
        "redis+sentinel://h:1/S?password=x",
        "unix:///s?DB=1",
    ],
)
def test_a_ledger_that_serve_could_not_connect_to_is_refused(url: str) -> None:
    """The URL is taken apart as the connection will."""
    (line,) = problems(f'lanes: {{a: {{}}}}\nledger: {{url: "{url}"}}')

    assert line.startswith("k.yaml: ledger.url: ")


@pytest.mark.parametrize(
    "url",
    [
        "redis://:geheim/x@h:1",
        "redis://u:geheim@h:1/abc",
        "redis://u:geheim℀@h",
        "redis://:a?geheim=1@h",
        "redis://:1#geheim@h:1",
        "rediss://h:1?geheim=1",
        "http://:geheim@h",
    ],
)
def test_a_ledgers_password_is_never_repeated(url: str) -> None:
    """Whatever is wrong with the URL."""
    (line,) = problems(f'lanes: {{a: {{}}}}\nledger: {{url: "{url}"}}')

    assert "geheim" not in line


# -- what a mistake's line says


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lane: {a: {}}", "lane: unknown key; did you mean lanes?"),
        ("lanes: {a: {maxInputToken: 3}}", "lanes.a.maxInputToken: unknown key; did you mean maxInputTokens?"),
        ("lanes: {a: {max_output_tokens: 3}}", "lanes.a.max_output_tokens: unknown key; did you mean maxOutputTokens?"),
        ("lanes: {a: {fallBack: t}}", "lanes.a.fallBack: unknown key; did you mean fallback?"),
        ("lanes: {a: {queue: {maxdepht: 3}}}", "lanes.a.queue.maxdepht: unknown key; did you mean maxDepth?"),
        (
            'lanes: {a: {}}\ntargets: {t: {engine: vllm, replicas: [{name: r, url: "http://h:1", kv-tokens: 3}]}}',
            "targets.t.replicas.0.kv-tokens: unknown key; did you mean kvTokens?",
        ),
        (
            "lanes: {a: {}}\nenvoy: {undecided: {open: {target: t, maxRequest: 3}}}",
            "envoy.undecided.open.maxRequest: unknown key; did you mean maxRequests?",
        ),
        ("lanes: {a: {}}\nqqqqqq: 1", "qqqqqq: unknown key; remove it or correct its spelling"),
    ],
)
def test_an_unknown_key_names_the_one_that_was_meant(text: str, line: str) -> None:
    """By the keys that stand at that place, however another tool would spell them."""
    assert problems(text) == [f"k.yaml: {line}"]


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ('lanes: {"x\\ny": {}}', "k.yaml: lanes.x\\ny: "),
        ('lanes: {"\\e[31mred": {}}', "k.yaml: lanes.\\x1b[31mred: "),
        ('lanes: {"a\u202eb": {}}', "k.yaml: lanes.a\\u202eb: "),
        ('lanes: {"": {}}', "k.yaml: lanes.(empty): "),
        ("lanes: {" + "k" * 900 + ": {}}", "k.yaml: lanes." + "k" * 100 + "…: "),
        ("lanes: *" + "k" * 5000, "k.yaml: line 1, column 8: "),
        ("lanes:\n  a: {}\x00", "k.yaml: line 2: holds the character 0x0; "),
        ("lanes: " + "{a: " * 5000, "k.yaml: nested too deeply; "),
        ("lanes: {a: {}}\nenvoy: {undecided: opened}", "k.yaml: envoy.undecided: "),
        (
            'targets: {t: {engine: vllm, servedModel: "\\ud83d\\ude00"}}',
            "k.yaml: targets.t.servedModel: holds half of a character; ",
        ),
    ],
    ids=lambda text: text[:24],
)
def test_hostile_text_is_told_on_lines_that_a_terminal_can_show(text: str, start: str) -> None:
    """Whatever was written: escaped where it cannot be printed, cut where it is long."""
    found = problems(text)

    assert found[0].startswith(start)
    assert all(line.isprintable() and len(line) < 500 for line in found)


def test_a_file_without_an_end_is_not_read_to_it() -> None:
    """A device, a pipe or a log in the configuration's place costs a bounded read."""
    with pytest.raises(ConfigError) as caught:
        load("/dev/zero")

    assert caught.value.problems == ["/dev/zero: is larger than 16 MiB; name a kvgate.yaml"]


# -- paths


def test_paths_are_found_from_the_files_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has no say; what is absolute stays; a catalogue name stays a name."""
    (tmp_path / "etc" / "local-model").mkdir(parents=True)
    path = written(
        tmp_path / "etc",
        """
models:
  m: {tokenizer: m/tokenizer.json, chatTemplate: ../t.jinja, geometry: local-model}
  n: {tokenizer: /abs/tokenizer.json, geometry: Qwen/Qwen2.5-Coder-7B-Instruct}
  o: {geometry: o.gguf}
envoy: {tls: {certFile: c.pem, keyFile: k.pem}}
targets: {far: {engine: openai, url: "https://api.example.com", tls: {caFile: ca.pem}}}
lanes: {a: {}}
""",
    )
    monkeypatch.chdir(tmp_path)
    config = load("etc/k.yaml")
    etc = path.parent

    m, n, o = (config.models[name] for name in "mno")
    assert (m.tokenizer, m.chat_template) == (f"{etc}/m/tokenizer.json", f"{etc}/../t.jinja")
    assert (m.geometry, n.geometry, o.geometry) == (
        f"{etc}/local-model",
        "Qwen/Qwen2.5-Coder-7B-Instruct",
        f"{etc}/o.gguf",
    )
    assert n.tokenizer == "/abs/tokenizer.json"
    assert config.envoy.tls is not None
    assert (config.envoy.tls.cert_file, config.envoy.tls.key_file) == (f"{etc}/c.pem", f"{etc}/k.pem")
    assert config.targets["far"].tls.ca_file == f"{etc}/ca.pem"


def test_a_ledgers_certificate_files_are_found_there_too(tmp_path: Path) -> None:
    """The rest of the URL, an escaped password included, stays as it was."""
    (tmp_path / "ca.pem").write_text(CERTIFICATE.read_text())
    path = written(tmp_path, 'lanes: {a: {}}\nledger: {url: "rediss://u:p%40ss@h:1/2?ca=ca.pem"}')

    assert load(path).ledger.url == f"rediss://u:p%40ss@h:1/2?ca={tmp_path}/ca.pem"


def test_a_local_run_keeps_the_paths_of_the_file_it_came_from(tmp_path: Path) -> None:
    """What ``up`` writes to its own directory still names the files beside the original."""
    path = written(tmp_path / "etc", TARGETS + "models: {m: {tokenizer: tok.json}}\nledger: {url: embedded}\n")
    data = effective.read(path)
    config = effective.write(tmp_path / "copy.yaml", data)

    assert config.models["m"].tokenizer == str(tmp_path / "etc" / "tok.json")
    assert set(data) == {"targets", "lanes", "models", "ledger"}
    assert "tls" not in data["targets"]["far"]


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("tokenizer: tok.json", "models.m.tokenizer"),
        ("tokenizer: tok.json, chatTemplate: t.jinja", "models.m.chatTemplate"),
    ],
)
def test_a_missing_file_is_said_with_file_and_path(tmp_path: Path, model: str, path: str) -> None:
    """As every mistake is."""
    file = written(tmp_path, TARGETS + f"models: {{m: {{{model}}}}}\n")
    with pytest.raises(ConfigError) as caught:
        Counting.from_config(load(file))

    (line,) = caught.value.problems
    assert line.startswith(f"{file}: {path}: {tmp_path}/")


def test_where_names_the_file() -> None:
    """Messages made after loading know it too."""
    assert load_text("lanes: {a: {}}", where="k.yaml").where == "k.yaml"
    assert Config().where == "defaults"
