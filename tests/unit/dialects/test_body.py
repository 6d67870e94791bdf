"""Content-encodings: decoded within bounds, refused with the status that fits."""

from __future__ import annotations

import gzip
import zlib

import pytest
import zstandard

from extproc.dialects import BodyLimits, decode_body
from extproc.errors import BadRequest
from extproc.types import RequestHead

PLAIN = b'{"model":"m","prompt":"' + b"x y z " * 500 + b'"}'
RAW_DEFLATE = zlib.compressobj(wbits=-15)

ENCODED = {
    "gzip": gzip.compress(PLAIN),
    "x-gzip": gzip.compress(PLAIN),
    "GZIP": gzip.compress(PLAIN),
    "deflate": zlib.compress(PLAIN),
    "zstd": zstandard.compress(PLAIN),
    " gzip , identity": gzip.compress(PLAIN),
}


def head(encoding: str) -> RequestHead:
    return RequestHead("POST", "/v1/completions", {"content-encoding": encoding})


def refusal(encoding: str, body: bytes, limits: BodyLimits | None = None) -> tuple[int, str]:
    with pytest.raises(BadRequest) as caught:
        decode_body(head(encoding), body, limits or BodyLimits())
    return caught.value.status, caught.value.code


@pytest.mark.parametrize("encoding", ENCODED)
def test_one_known_encoding_is_undone(encoding: str) -> None:
    """gzip, deflate and zstd, in any case and beside identity, give the plain bytes."""
    decoded = decode_body(head(encoding), ENCODED[encoding], BodyLimits())
    assert (decoded.data, decoded.changed) == (PLAIN, True)


def test_raw_deflate_is_undone() -> None:
    """Deflate without the zlib wrapper, as some clients send it, is read too."""
    body = RAW_DEFLATE.compress(PLAIN) + RAW_DEFLATE.flush()
    assert decode_body(head("deflate"), body, BodyLimits()).data == PLAIN


@pytest.mark.parametrize("encoding", ["", "identity", " Identity , "])
def test_identity_is_the_same_object(encoding: str) -> None:
    """An unencoded body is not copied."""
    decoded = decode_body(head(encoding), PLAIN, BodyLimits())
    assert decoded.data is PLAIN
    assert not decoded.changed


@pytest.mark.parametrize("encoding", ["br", "compress", "gzip, gzip", "gzip, br", "zstd,gzip"])
def test_other_or_stacked_encodings_are_415(encoding: str) -> None:
    """What we do not decode is named, not called invalid JSON."""
    assert refusal(encoding, gzip.compress(PLAIN)) == (415, "unsupported_content_encoding")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_corrupt_data_is_400(encoding: str) -> None:
    """Garbage, an empty body and damaged data are the client's mistake."""
    whole = ENCODED[encoding]
    for body in (b"", b"garbage", bytes([whole[0], whole[1]]) + b"\xff" * 40):
        assert refusal(encoding, body) == (400, "invalid_encoding")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_cut_data_is_400(encoding: str) -> None:
    """A stream that ends early is not taken for complete."""
    assert refusal(encoding, ENCODED[encoding][:-9]) == (400, "invalid_encoding")


def test_data_behind_a_deflate_stream_is_400() -> None:
    """Trailing bytes would be lost in forwarding."""
    assert refusal("deflate", zlib.compress(PLAIN) + b"more") == (400, "invalid_encoding")


def test_gzip_members_are_joined() -> None:
    """RFC 1952: several members are one body."""
    body = gzip.compress(PLAIN[:100]) + gzip.compress(PLAIN[100:])
    assert decode_body(head("gzip"), body, BodyLimits()).data == PLAIN


def test_many_gzip_members_are_refused() -> None:
    """Thousands of tiny members would cost a decoder each."""
    assert refusal("gzip", gzip.compress(b"") * 1000) == (400, "invalid_encoding")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_a_bomb_is_413(encoding: str) -> None:
    """Output beyond the ratio stops early, long before it is complete."""
    bomb = b"\0" * (64 * 1024 * 1024)
    packed = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstandard.compress}[encoding](bomb)
    assert refusal(encoding, packed) == (413, "request_too_large")


@pytest.mark.parametrize("encoding", ["", "gzip"])
def test_too_many_bytes_are_413(encoding: str) -> None:
    """The size limit holds before and after decoding."""
    body = gzip.compress(PLAIN) if encoding else PLAIN
    assert refusal(encoding, body, BodyLimits(max_bytes=1000)) == (413, "request_too_large")


def test_a_zstd_window_over_the_limit_is_refused() -> None:
    """A frame that asks for more memory than allowed is not decoded."""
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    body = stream.compress(PLAIN) + stream.flush()
    assert refusal("zstd", body, BodyLimits(max_window_bytes=1 << 20)) == (400, "invalid_encoding")
