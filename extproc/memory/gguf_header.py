"""GGUF headers: metadata and tensor shapes, read without touching tensor data.

Owns the container format (v2 and v3, either byte order); knows no model. The header of a 40 GB file is a few MB,
so a bounded buffered read from the file object is all that happens. Format: ggml docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from extproc.errors import GeometryError
from extproc.memory.hf_fields import short

_SCALARS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
#: Arrays longer than this are vocabularies; only their length is kept.
_LONGEST_ARRAY = 4096
#: Refuse lengths that only a damaged file has.
_LONGEST_STRING = 64 << 20
_MOST_ENTRIES = 1 << 24
_MOST_ELEMENTS = 1 << 48

#: (elements, bytes) of a block by ggml type number; gguf 0.19.0 constants.py GGML_QUANT_SIZES.
TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22), 7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34), 9: ("q8_1", 32, 40), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 15: ("q8_k", 256, 292), 16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50), 20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136), 24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4), 27: ("i64", 1, 8), 28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66), 39: ("mxfp4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file: ``elements`` and the bytes they take in the file."""

    name: str
    type_name: str
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (long arrays are replaced by their length under ``<key>.#len``) and the tensor list."""

    fields: Mapping[str, object]
    tensors: tuple[Tensor, ...]


class _Reader:
    def __init__(self, file: BinaryIO, where: str) -> None:
        self._file = file
        self._where = where
        self.order = "<"

    def take(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise GeometryError(f"{self._where}: GGUF header ends early; the file is truncated")
        return data

    def scalar(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(self.order + code, self.take(struct.calcsize("=" + code)))[0]
        return value

    def count(self, limit: int, what: str) -> int:
        value = int(self.scalar("Q"))
        if value > limit:
            raise GeometryError(f"{self._where}: GGUF {what} of {value} is not credible; the file is damaged")
        return value

    def string(self) -> str:
        return self.take(self.count(_LONGEST_STRING, "string length")).decode("utf-8", "replace")

    def value(self, kind: int, key: str, out: dict[str, object]) -> object:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise GeometryError(f"{self._where}: GGUF field {short(key)} has unknown type {kind}")
        item, length = int(self.scalar("I")), self.count(_MOST_ENTRIES, "array length")
        if item == _ARRAY:
            raise GeometryError(f"{self._where}: GGUF field {short(key)} is an array of arrays, which no model has")
        if length <= _LONGEST_ARRAY:
            return [self.value(item, key, out) for _ in range(length)]
        out[f"{key}.#len"] = length
        if item in _SCALARS:
            self.take(length * struct.calcsize("=" + _SCALARS[item]))
        else:
            for _ in range(length):
                self.value(item, key, out)
        return None


def read_header(file: BinaryIO, where: str) -> GgufHeader:
    """Header of an open GGUF file; GeometryError names ``where`` and what is damaged."""
    reader = _Reader(file, where)
    if reader.take(4) != b"GGUF":
        raise GeometryError(f"{where}: not a GGUF file (its first four bytes are not GGUF)")
    version = int(reader.scalar("I"))
    if version not in (2, 3):
        reader.order = ">"
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in (2, 3):
        raise GeometryError(f"{where}: GGUF version {version} is not understood; versions 2 and 3 are")
    tensor_count, field_count = reader.count(_MOST_ENTRIES, "tensor count"), reader.count(_MOST_ENTRIES, "field count")
    fields: dict[str, object] = {}
    for _ in range(field_count):
        key = reader.string()
        value = reader.value(int(reader.scalar("I")), key, fields)
        if value is not None:
            fields[key] = value
    return GgufHeader(fields, tuple(_tensor(reader, where) for _ in range(tensor_count)))


def _tensor(reader: _Reader, where: str) -> Tensor:
    name = reader.string()
    dims = int(reader.scalar("I"))
    if dims > 8:
        raise GeometryError(f"{where}: tensor {short(name)} has {dims} dimensions; the file is damaged")
    elements = 1
    for _ in range(dims):
        elements *= int(reader.scalar("Q"))
    if elements > _MOST_ELEMENTS:
        raise GeometryError(f"{where}: tensor {short(name)} has {elements} elements; the file is damaged")
    kind = int(reader.scalar("I"))
    reader.scalar("Q")  # offset into the data that is never read
    if kind not in TENSOR_TYPES:
        raise GeometryError(f"{where}: tensor {short(name)} has unknown ggml type {kind}")
    type_name, per_block, block_bytes = TENSOR_TYPES[kind]
    return Tensor(name, type_name, elements, -(-elements // per_block) * block_bytes)
