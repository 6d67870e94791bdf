"""Fuzz target: the decompressors.

An input below 128 is a codec and a stream as a client may send it. One from 128 on is a recipe: a codec, how often a
piece repeats (up to a million times: bombs), how many members or frames follow each other, and which byte is damaged.
A stream gives what was packed, within the limit, or a 4xx; an undamaged one within the limits is never refused.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import atheris
import zstandard

with atheris.instrument_imports(include=["extproc.dialects.body"]):
    from extproc.dialects import BodyLimits, decode_body
    from extproc.errors import BadRequest
    from extproc.types import RequestHead

from tests.fuzz.target import Finding, run

LIMITS = BodyLimits(max_bytes=1 << 20, ratio_floor_bytes=1 << 18)
CODECS = ("gzip", "deflate", "zstd")
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.compress,
}
#: Plain bytes of one member of a recipe: four times what the limit lets through.
PLAIN_BYTES = 4 * LIMITS.max_bytes


@dataclass(frozen=True, slots=True)
class Recipe:
    """A stream to be made: what it holds, and whether a byte of it is damaged."""

    codec: str
    plain: bytes
    stream: bytes
    whole: bool


def recipe(data: bytes) -> Recipe | None:
    """Read a recipe; None where there is nothing to pack."""
    piece = data[6:]
    if not piece:
        return None
    codec = CODECS[data[0] % 3]
    members = 1 if codec == "deflate" else 1 + data[1] % 8
    repeat = min(1 << data[2] % 21, max(1, PLAIN_BYTES // len(piece)))
    stream = bytearray(PACKERS[codec](piece * repeat) * members)
    place = int.from_bytes(data[3:5], "big") % len(stream)
    stream[place] ^= data[5]
    return Recipe(codec, piece * repeat * members, bytes(stream), data[5] == 0)


def judge(data: bytes) -> None:
    """One stream, decoded within bounds or refused."""
    if not data:
        return
    if data[0] < 128:
        decoded(CODECS[data[0] % 3], data[1:])
        return
    made = recipe(data)
    if made is None:
        return
    found = decoded(made.codec, made.stream)
    if not made.whole:
        return
    within = len(made.plain) <= LIMITS.max_bytes and (
        len(made.plain) <= LIMITS.ratio_floor_bytes or len(made.plain) <= LIMITS.max_ratio * len(made.stream)
    )
    if within and found != made.plain:
        raise Finding(f"a whole {made.codec} stream was {'refused' if found is None else 'changed'}")
    if not within and found is not None:
        raise Finding(f"a {made.codec} stream over the limits was let through")


def decoded(codec: str, stream: bytes) -> bytes | None:
    """The plain bytes, None where the stream is refused as it should be."""
    head = RequestHead("POST", "/v1/completions", {"content-encoding": codec})
    try:
        plain = decode_body(head, stream, LIMITS).data
    except BadRequest as error:
        if error.status not in (400, 413):
            raise Finding(f"a refusal with status {error.status}") from error
        return None
    if len(plain) > LIMITS.max_bytes:
        raise Finding(f"{len(plain)} bytes passed a limit of {LIMITS.max_bytes}")
    return plain


if __name__ == "__main__":
    run(judge)
