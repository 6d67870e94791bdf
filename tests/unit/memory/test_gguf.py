"""GGUF headers and their geometry, on files that the ``gguf`` package itself writes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest

from extproc.errors import GeometryError
from extproc.memory import geometry_from_gguf, load_geometry
from extproc.memory.gguf_header import TENSOR_TYPES, read_header

LLAMA: Mapping[str, object] = {
    "block_count": 4, "context_length": 8192, "embedding_length": 512, "feed_forward_length": 1024, "attention.head_count": 8,
    "attention.head_count_kv": 2,
}  # fmt: skip


def write(path: Path, arch: str, fields: Mapping[str, object], order: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE) -> Path:
    """A GGUF with these fields and two tensors, as the reference implementation writes it."""
    writer = gguf.GGUFWriter(path, arch, endianess=order)
    for key, value in fields.items():
        name = f"{arch}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        else:
            writer.add_uint32(name, int(str(value)))
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(5000)])
    writer.add_tensor("token_embd.weight", np.zeros((16, 512), dtype=np.float16))
    writer.add_tensor(
        "blk.0.attn_q.weight", np.zeros((16, 34), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_header_agrees_with_the_reference_reader(tmp_path: Path) -> None:
    """Fields, tensor shapes and tensor bytes are those that the gguf package reads."""
    path = write(tmp_path / "m.gguf", "llama", LLAMA)
    reference = gguf.GGUFReader(path)
    with path.open("rb") as file:
        header = read_header(file, str(path))
    assert header.fields["llama.attention.head_count_kv"] == 2
    assert {t.name: (t.elements, t.nbytes) for t in header.tensors} == {
        t.name: (int(t.n_elements), int(t.n_bytes)) for t in reference.tensors
    }


def test_tensor_types_agree_with_the_reference_table() -> None:
    """Block sizes are those of GGML_QUANT_SIZES, for every type both know."""
    reference = {int(t): s for t, s in gguf.GGML_QUANT_SIZES.items()}
    assert {n: (e, b) for n, (_, e, b) in TENSOR_TYPES.items()} == {n: reference[n] for n in TENSOR_TYPES}


def test_long_vocabularies_are_only_counted(tmp_path: Path) -> None:
    """The vocabulary's size is known though its tokens are not kept."""
    geometry = load_geometry(write(tmp_path / "m.gguf", "llama", LLAMA))
    assert (geometry.vocab, geometry.groups[0].layers, geometry.groups[0].kv_heads, geometry.groups[0].k_dim) == (
        5000,
        4,
        2,
        64,
    )


def test_weights_are_the_tensors_bytes(tmp_path: Path) -> None:
    """Weight bytes come from the tensor list: f16 plus 34 bytes per 32 elements."""
    geometry = load_geometry(write(tmp_path / "m.gguf", "llama", LLAMA))
    assert geometry.weights_bytes == 16 * 512 * 2 + 16 * 34


def test_big_endian_files_are_read(tmp_path: Path) -> None:
    """Byte order is found from the version field."""
    path = write(tmp_path / "m.gguf", "llama", LLAMA, gguf.GGUFEndian.BIG)
    assert load_geometry(path).groups[0].layers == 4


def test_tensor_data_is_never_read(tmp_path: Path) -> None:
    """A file cut off after its header still has a geometry."""
    path = write(tmp_path / "m.gguf", "llama", LLAMA)
    data = path.read_bytes()
    path.write_bytes(data[: gguf.GGUFReader(path).data_offset])
    assert load_geometry(path).groups[0].layers == 4


FAMILIES: Mapping[str, tuple[str, Mapping[str, object], list[tuple[str, int, int, int]]]] = {
    "per-layer heads": ("llama", LLAMA | {"attention.head_count_kv": [2, 0, 2, 1]}, [("full", 2, 2, 0), ("full", 1, 1, 0)]),
    "window with a pattern list": (
        "gemma3", LLAMA | {"attention.sliding_window": 512, "attention.sliding_window_pattern": [True, True, True, False]},
        [("sliding", 3, 2, 512), ("full", 1, 2, 0)]),
    "window by architecture": ("gpt-oss", LLAMA | {"attention.sliding_window": 128}, [("sliding", 2, 2, 128), ("full", 2, 2, 0)]),
    "window that llama.cpp ignores": ("phi3", LLAMA | {"attention.sliding_window": 2047}, [("full", 4, 2, 0)]),
    "shared layers": ("gemma3n", LLAMA | {"attention.shared_kv_layers": 1, "attention.sliding_window": 512,
                                          "attention.sliding_window_pattern": [True, False, True, False]},
                      [("sliding", 2, 2, 512), ("full", 1, 2, 0)]),
    "latent": ("deepseek2", LLAMA | {"attention.head_count_kv": 1, "attention.key_length": 576, "attention.value_length": 512,
                                     "attention.key_length_mla": 192, "attention.value_length_mla": 128,
                                     "attention.kv_lora_rank": 512, "rope.dimension_count": 64}, [("mla", 4, 1, 0)]),
    "latent model in an old file": (
        "deepseek2", LLAMA | {"attention.head_count_kv": 8, "attention.key_length": 192, "attention.value_length": 128,
                              "attention.kv_lora_rank": 512, "rope.dimension_count": 64}, [("full", 4, 8, 0)]),
    "recurrent by interval": (
        "qwen3next", LLAMA | {"ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 128, "ssm.group_count": 16},
        [("state", 3, 0, 0), ("full", 1, 2, 0)]),
    "recurrent where there are no heads": (
        "jamba", LLAMA | {"attention.head_count_kv": [0, 2, 0, 0], "ssm.conv_kernel": 4, "ssm.inner_size": 1024, "ssm.state_size": 16},
        [("state", 3, 0, 0), ("full", 1, 2, 0)]),
    "feed-forward layers cache nothing": (
        "nemotron_h", LLAMA | {"attention.head_count_kv": [0, 2, 0, 0], "feed_forward_length": [0, 0, 1024, 0], "ssm.conv_kernel": 4,
                               "ssm.inner_size": 1024, "ssm.state_size": 128, "ssm.group_count": 8},
        [("state", 2, 0, 0), ("full", 1, 2, 0)]),
    "prediction layers are not counted": ("glm4moe", LLAMA | {"nextn_predict_layers": 1}, [("full", 3, 2, 0)]),
    "chunked": ("llama4", LLAMA, [("chunked", 3, 2, 8192), ("full", 1, 2, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("case", FAMILIES)
def test_layer_groups(case: str) -> None:
    """Each architecture's keys become the groups that llama.cpp caches."""
    arch, fields, expected = FAMILIES[case]
    named = {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in fields.items()}
    geometry = geometry_from_gguf(named, "m.gguf")
    assert [(str(g.kind), g.layers, g.kv_heads, g.window) for g in geometry.groups] == expected


def test_split_files_are_summed_and_missing_parts_named(tmp_path: Path) -> None:
    """All parts count; one that is missing is an error that says how many are there."""
    first = write(tmp_path / "m-00001-of-00002.gguf", "llama", LLAMA)
    with pytest.raises(GeometryError, match="1 of 2 parts"):
        load_geometry(first)
    write(tmp_path / "m-00002-of-00002.gguf", "llama", LLAMA)
    assert load_geometry(first).weights_bytes == 2 * (16 * 512 * 2 + 16 * 34)


def test_a_directory_with_one_gguf_is_a_model(tmp_path: Path) -> None:
    """A directory is understood by the one model in it, and two are an error that names one."""
    write(tmp_path / "a.gguf", "llama", LLAMA)
    assert load_geometry(tmp_path).groups[0].layers == 4
    write(tmp_path / "b.gguf", "llama", LLAMA)
    with pytest.raises(GeometryError, match=r"2 GGUF models.*a\.gguf"):
        load_geometry(tmp_path)


DAMAGED = {
    "not a GGUF": b"PK\x03\x04" + bytes(64),
    "a version from the future": b"GGUF" + struct.pack("<I", 99) + bytes(64),
    "cut off": b"GGUF" + struct.pack("<IQQ", 3, 1, 5),
    "incredible counts": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1),
    "incredible string": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 40),
    "unknown field type": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77),
    "empty": b"",
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_one_clear_error(case: str, tmp_path: Path) -> None:
    """Damage is a GeometryError that names the file, whatever the bytes."""
    path = tmp_path / "m.gguf"
    path.write_bytes(DAMAGED[case])
    with pytest.raises(GeometryError, match=r"m\.gguf"):
        load_geometry(path)


def test_a_missing_key_is_named() -> None:
    """The error names the metadata key."""
    with pytest.raises(GeometryError, match=r"'llama\.block_count'"):
        geometry_from_gguf({"general.architecture": "llama"}, "m.gguf")


ODD: Mapping[str, tuple[str, Mapping[str, object], str]] = {
    "heads in words": ("llama", {"attention.head_count": "eight"}, "attention.head_count"),
    "heads that do not divide": ("llama", {"attention.head_count_kv": 3}, "attention.head_count_kv"),
    "a word among the heads": ("llama", {"attention.head_count_kv": [2, 2, "2", 2]}, "attention.head_count_kv"),
    "a pattern in words": (
        "gemma3", {"attention.sliding_window": 512, "attention.sliding_window_pattern": ["a"] * 4}, "sliding_window_pattern"),
    "a pattern that is a word": ("gemma3", {"attention.sliding_window": 512, "attention.sliding_window_pattern": "x"}, "sliding_window_pattern"),
    "no layer of its own": ("llama", {"attention.shared_kv_layers": 4}, "shared_kv_layers"),
    "only prediction layers": ("llama", {"nextn_predict_layers": 4}, "nextn_predict_layers"),
    "an empty state": ("qwen3next", {"ssm.conv_kernel": 4, "ssm.inner_size": 0, "ssm.state_size": 128}, "ssm.inner_size"),
    "an empty latent": ("deepseek2", {"attention.kv_lora_rank": 0, "rope.dimension_count": 64}, "attention.kv_lora_rank"),
    "values without width": ("llama", {"attention.key_length": 64, "attention.value_length": 0}, "v dim 0"),
    "an architecture that is no name": ("ll\nama", {}, "general.architecture"),
    "an image projector": ("clip", {}, "image projector"),
    "an encoder": ("nomic-bert", {}, "keeps no KV cache"),
    "recurrent layers alone": ("rwkv7", {}, "keeps no KV cache"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_odd_metadata_names_its_key(case: str) -> None:
    """Metadata of another type, or a figure that cannot be, is one line with the key; nothing stands in for it."""
    arch, fields, named = ODD[case]
    given = {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in (LLAMA | fields).items()}
    with pytest.raises(GeometryError, match=rf"^m\.gguf: .*{named}") as caught:
        geometry_from_gguf(given, "m.gguf")
    assert "\n" not in str(caught.value)


def test_a_header_cut_anywhere_is_one_clear_error(tmp_path: Path) -> None:
    """Every truncation of the header is a GeometryError and never a geometry."""
    path = write(tmp_path / "m.gguf", "llama", LLAMA)
    data = path.read_bytes()
    tokens = data.index(b"tokenizer.ggml.tokens")
    for end in (
        *range(tokens + 200),
        *range(len(data) - 16 * 1024 - 16 * 34 - 400, len(data) - 16 * 1024 - 16 * 34 - 60),
    ):
        path.write_bytes(data[:end])
        with pytest.raises(GeometryError, match=r"m\.gguf"):
            load_geometry(path)


def _header(field: bytes, tensor: bytes = b"") -> bytes:
    count = 1 if tensor else 0
    return b"GGUF" + struct.pack("<IQQQ", 3, count, 1, 1) + b"k" + field + tensor


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (_header(struct.pack("<IIQ", 9, 9, 1 << 20)), "array of arrays"),
        (_header(struct.pack("<IB", 7, 1), struct.pack("<Q", 1) + b"t" + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0)), "elements"),
        (_header(struct.pack("<IIQ", 9, 77, 1)), "unknown type 77"),
    ],
)  # fmt: skip
def test_incredible_headers_are_refused(data: bytes, match: str, tmp_path: Path) -> None:
    """Nested arrays, tensors larger than any disk and unknown array items are damage."""
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(GeometryError, match=match):
        load_geometry(path)


def test_a_blob_without_an_ending_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    """Ollama keeps models under their digest."""
    path = write(tmp_path / "m.gguf", "llama", LLAMA).rename(tmp_path / "sha256-0123")
    assert load_geometry(path).groups[0].layers == 4


def test_a_projector_beside_the_model_is_no_second_model(tmp_path: Path) -> None:
    """The directory's one model is understood though its mmproj file lies there too."""
    write(tmp_path / "model.gguf", "llama", LLAMA)
    write(tmp_path / "mmproj-model.gguf", "clip", {})
    assert load_geometry(tmp_path).groups[0].layers == 4


def test_parts_are_found_by_their_own_names(tmp_path: Path) -> None:
    """Another split of the same model, brackets in the name and a foreign part are told apart."""
    for name in ("m[a]-00001-of-00002.gguf", "m[a]-00002-of-00002.gguf", "m[a]-00001-of-00003.gguf"):
        write(tmp_path / name, "llama", LLAMA)
    assert load_geometry(tmp_path / "m[a]-00002-of-00002.gguf").weights_bytes == 2 * (16 * 512 * 2 + 16 * 34)
    with pytest.raises(GeometryError, match=r"1 of 3 parts are there \(m\[a\]-00002-of-00003\.gguf is missing\)"):
        load_geometry(tmp_path / "m[a]-00001-of-00003.gguf")


def test_a_renamed_part_does_not_pass_for_the_model(tmp_path: Path) -> None:
    """split.count in the header says that more parts belong to it."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in LLAMA.items():
        writer.add_uint32(f"llama.{key}", int(str(value)))
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(GeometryError, match=r"'split\.count' says 3 parts"):
        load_geometry(path)
