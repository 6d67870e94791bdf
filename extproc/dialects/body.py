"""Content-encodings and byte-level checks of a body, within bounds of size, ratio and memory.

One encoding out of gzip, deflate and zstd is undone; the decoded bytes are what is forwarded. A stack of
encodings or any other name is 415, broken data 400, too much of it 413.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import zstandard

from extproc.dialects.model import BodyLimits, DecodedBody
from extproc.errors import BadRequest
from extproc.types import RequestHead

#: Bytes produced per decompression step: what may be written before the bounds are looked at again.
_STEP_BYTES = 256 * 1024

#: Input handed to zlib at a time: it copies what it did not consume, so large pieces would cost quadratic time.
_FEED_BYTES = 64 * 1024

#: Concatenated gzip members; each costs a new decoder, so their number is bounded (RFC 1952 names no limit).
_MAX_GZIP_MEMBERS = 256

_ACCEPTED = "gzip, deflate, zstd"

#: Put behind a zstd body as a frame of its own: the reader does not say whether the last frame was whole, but a cut
#: one swallows this.
_ZSTD_END = bytes(range(0xE1, 0xF1))
_ZSTD_END_FRAME = zstandard.ZstdCompressor(write_checksum=True).compress(_ZSTD_END)


def decode_body(head: RequestHead, body: bytes, limits: BodyLimits) -> DecodedBody:
    """The body without its content-encoding; an identity body is returned as the same object.

    Raises:
        BadRequest: 415 ``unsupported_content_encoding``, 400 ``invalid_encoding``, 413 ``request_too_large``.
    """
    if len(body) > limits.max_bytes:
        raise too_large(limits)
    declared = head.headers.get("content-encoding")
    if not declared:
        return DecodedBody(body, False)
    names = [name for part in declared.split(",") if (name := part.strip().lower())]
    names = [name for name in names if name != "identity"]
    if not names:
        return DecodedBody(body, False)
    decoder = _DECODERS.get(names[0])
    if len(names) > 1 or decoder is None:
        raise BadRequest(
            415,
            "unsupported_content_encoding",
            f"Content-Encoding is not supported here; send one of {_ACCEPTED}, or none.",
            "content-encoding",
        )
    if not body:
        raise BadRequest(400, "invalid_encoding", f"The body is empty but is declared as {names[0]}.")
    return DecodedBody(_bounded(decoder(body, limits), len(body), limits, names[0]), True)


def too_large(limits: BodyLimits) -> BadRequest:
    """The refusal of a body over the size limit."""
    return BadRequest(413, "request_too_large", f"The request body is over the limit of {limits.max_bytes} bytes.")


def _bounded(pieces: Iterator[bytes], sent: int, limits: BodyLimits, name: str) -> bytes:
    out: list[bytes] = []
    total = 0
    try:
        for piece in pieces:
            total += len(piece)
            if total > limits.max_bytes:
                raise too_large(limits)
            if total > limits.ratio_floor_bytes and total > sent * limits.max_ratio:
                raise BadRequest(
                    413, "request_too_large", f"The {name} body expands by more than {limits.max_ratio} times."
                )
            out.append(piece)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        raise BadRequest(400, "invalid_encoding", f"The body is not valid {name} data.") from error
    return b"".join(out)


def _zlib_pieces(body: bytes, wbits: int, members: int) -> Iterator[bytes]:
    stream = zlib.decompressobj(wbits)
    for start in range(0, len(body), _FEED_BYTES):
        rest = body[start : start + _FEED_BYTES]
        while rest:
            if stream.eof:
                members -= 1
                if not members:
                    raise zlib.error("data behind the end")
                stream = zlib.decompressobj(wbits)
            yield stream.decompress(rest, _STEP_BYTES)
            rest = stream.unused_data if stream.eof else stream.unconsumed_tail
    while not stream.eof:
        piece = stream.decompress(b"", _STEP_BYTES)
        if not piece:
            raise EOFError("data ends early")
        yield piece


def _gzip(body: bytes, limits: BodyLimits) -> Iterator[bytes]:
    return _zlib_pieces(body, 31, _MAX_GZIP_MEMBERS)


def _deflate(body: bytes, limits: BodyLimits) -> Iterator[bytes]:
    # RFC 9110 means the zlib format by "deflate"; some clients send raw deflate, as browsers' servers found out.
    zlib_header = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return _zlib_pieces(body, 15 if zlib_header else -15, 1)


def _zstd(body: bytes, limits: BodyLimits) -> Iterator[bytes]:
    decoder = zstandard.ZstdDecompressor(max_window_size=limits.max_window_bytes)
    held = b""
    with decoder.stream_reader(body + _ZSTD_END_FRAME, read_across_frames=True) as reader:
        while piece := reader.read(_STEP_BYTES):
            whole = held + piece
            held = whole[-len(_ZSTD_END) :]
            yield whole[: -len(_ZSTD_END)]
    if held != _ZSTD_END:
        raise EOFError("data ends early")


_DECODERS: dict[str, Callable[[bytes, BodyLimits], Iterator[bytes]]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "zstd": _zstd,
}
