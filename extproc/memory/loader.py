"""From what a user names to a geometry: the only module of this package that reads files.

Owns the order in which a name is understood (existing path, then catalogue) and the weight sizes seen on disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from extproc.errors import GeometryError
from extproc.memory.catalogue import catalogue_geometry
from extproc.memory.geometry import Geometry
from extproc.memory.gguf_geometry import geometry_from_gguf
from extproc.memory.gguf_header import read_header
from extproc.memory.hf import geometry_from_config
from extproc.memory.hf_fields import plain, short, whole

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
#: Weight files in the order in which one kind stands for all: repositories also carry the same weights once more
#: (``consolidated.safetensors`` beside ``model-*.safetensors``).
_WEIGHTS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.pth")
#: What git leaves where git-lfs did not fetch the file; its size stands inside.
_LFS_POINTER = re.compile(rb"version https://git-lfs[^\n]*\n(?:[^\n]*\n)*?size (\d{1,18})\n")


def load_geometry(spec: str | Path) -> Geometry:
    """Geometry of a ``config.json``, model directory, GGUF file or catalogue name.

    GeometryError names the file and the field, or close catalogue names. No tensor data is read.
    """
    text = str(spec)
    if not text.strip():
        raise GeometryError(
            "the model's name is empty; give a config.json, a directory, a GGUF file or a catalogue name"
        )
    try:
        path = Path(spec).expanduser()
        if path.is_dir():
            return _from_directory(path)
        if path.is_file():
            return _from_gguf(path) if _is_gguf(path) else _from_config(path)
    except (OSError, RuntimeError) as e:  # no right to look, a name too long, a home of nobody
        reason = e.strerror if isinstance(e, OSError) else str(e)
        raise GeometryError(
            f"{plain(text)}: cannot be looked at ({reason}); name a readable file or a catalogue name"
        ) from e
    if text.endswith((".json", ".gguf")) or text.startswith(("/", "./", "../", "~")):
        raise GeometryError(
            f"{plain(text)}: no such file; give a config.json, a model directory, a GGUF file or a catalogue name"
        )
    return catalogue_geometry(text)


def _is_gguf(path: Path) -> bool:
    """By its name or its first bytes: Ollama's blobs are GGUF files without the ending."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _from_directory(path: Path) -> Geometry:
    config = path / "config.json"
    if config.is_file():
        return _from_config(config)
    # Image projectors (mmproj-*.gguf) lie beside the model that they belong to.
    files = sorted(f for f in path.glob("*.gguf") if not f.name.lower().startswith("mmproj"))
    firsts = [f for f in files if not (m := _SPLIT.search(f.name)) or m.group(1) == "00001"]
    if len(firsts) == 1:
        return _from_gguf(firsts[0])
    if firsts:
        raise GeometryError(f"{path}: holds {len(firsts)} GGUF models; name one of them, e.g. {firsts[0].name}")
    raise GeometryError(f"{path}: holds neither config.json nor a .gguf file")


def _from_config(path: Path) -> Geometry:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise GeometryError(f"{path}: not readable as JSON ({e})") from e
    if not isinstance(config, Mapping):
        raise GeometryError(f"{path}: holds a {type(config).__name__}; expected an object")
    name = str(config.get("_name_or_path") or path.resolve().parent.name)
    geometry = geometry_from_config(config, where=str(path), name=name)
    separate = _separate_quantization(path.parent)
    return replace(
        geometry,
        weights_bytes=_safetensors_bytes(path.parent),
        quantization=geometry.quantization or separate.get("quant_algo"),
        kv_dtype=geometry.kv_dtype or separate.get("kv_cache_quant_algo"),
        source=str(path),
    )


#: Marks in an algorithm's name -> format; of MIXED_PRECISION none, so that the weights count as plain.
_ALGORITHMS = (("fp4", "nvfp4"), ("fp8", "fp8"), ("w4a16", "w4a16"))


def _separate_quantization(folder: Path) -> Mapping[str, str]:
    """Formats of the weights and of the cache in ModelOpt's hf_quant_config.json, as far as it names any."""
    try:
        given = json.loads((folder / "hf_quant_config.json").read_bytes())["quantization"]
        named = {key: str(given.get(key)).lower() for key in ("quant_algo", "kv_cache_quant_algo")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    found = {key: next((form for mark, form in _ALGORITHMS if mark in name), None) for key, name in named.items()}
    return {key: form for key, form in found.items() if form is not None}


def _safetensors_bytes(folder: Path) -> int | None:
    """Bytes of the weight files beside a config, from the index where the files are elsewhere; None where neither is."""
    for pattern in _WEIGHTS:
        sizes = [_file_bytes(f) for f in folder.glob(pattern) if f.is_file()]
        if sizes:
            return sum(sizes)
    index = folder / "model.safetensors.index.json"
    try:
        total = json.loads(index.read_bytes())["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    number = whole(total)
    if number is None or number <= 0:
        raise GeometryError(f"{index}: field 'metadata.total_size' is {short(total)}; expected the weights' bytes")
    return number


def _file_bytes(path: Path) -> int:
    """A weight file's size, of a git-lfs pointer the size of the file that it stands for."""
    size = path.stat().st_size
    if size < 1024:
        pointer = _LFS_POINTER.match(path.read_bytes())
        return int(pointer.group(1)) if pointer else size
    return size


def _parts(path: Path) -> list[Path]:
    """The files of a split model in their order, or the file itself."""
    split = _SPLIT.search(path.name)
    if split is None:
        return [path]
    total = split.group(2)
    parts = [path.with_name(_SPLIT.sub(f"-{i:05d}-of-{total}.gguf", path.name)) for i in range(1, int(total) + 1)]
    missing = [p.name for p in parts if not p.is_file()]
    if missing or not parts:
        there = len(parts) - len(missing)
        raise GeometryError(
            f"{path}: {there} of {int(total)} parts are there ({', '.join(missing[:1]) or path.name} is missing); put all"
            " parts in one directory"
        )
    return parts


def _from_gguf(path: Path) -> Geometry:
    parts = _parts(path)
    headers = []
    for part in parts:
        try:
            with part.open("rb") as file:
                headers.append(read_header(file, str(part)))
        except OSError as e:
            raise GeometryError(f"{part}: not readable ({e.strerror})") from e
    said = whole(headers[0].fields.get("split.count"))
    if said is not None and said > len(parts):
        raise GeometryError(
            f"{path}: field 'split.count' says {said} parts; keep the names ...-00001-of-{said:05d}.gguf and put all parts"
            " in one directory"
        )
    tensors = [t for h in headers for t in h.tensors]
    geometry = geometry_from_gguf(headers[0].fields, str(path), tensors, name=path.stem)
    return replace(geometry, source=str(path))
