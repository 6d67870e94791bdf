"""Image tokens from the picture's own header."""

from __future__ import annotations

import struct
import zlib

import pytest

from extproc.memory import image_size, image_tokens
from extproc.memory.vision import FAMILIES


def png(width: int, height: int) -> bytes:
    """A PNG's signature and IHDR."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


def jpeg(width: int, height: int, *, extra: bytes = b"", frame: int = 0xC0) -> bytes:
    """A JPEG up to its frame header, with an EXIF block before it."""
    exif = b"\xff\xe1" + struct.pack(">H", 2 + 600) + bytes(600)
    return b"\xff\xd8" + exif + extra + b"\xff" + bytes([frame]) + struct.pack(">HBHHB", 17, 8, height, width, 3)


def webp(kind: bytes, body: bytes) -> bytes:
    """A RIFF container with one chunk."""
    return b"RIFF" + struct.pack("<I", 4 + 8 + len(body)) + b"WEBP" + kind + struct.pack("<I", len(body)) + body


def gif(width: int, height: int, *, magic: bytes = b"GIF89a", frame: tuple[int, int, int, int] = (0, 0, 1, 1)) -> bytes:
    """A GIF with a colour table and a comment, up to its first frame's place."""
    comment = b"\x21\xfe\x05words\x02ab\x00"
    return (
        magic + struct.pack("<HHBBB", width, height, 0x81, 0, 0) + bytes(12) + comment
        + b"\x2c" + struct.pack("<HHHH", *frame) + b"\0"
    )  # fmt: skip


HEADERS = {
    "png": png(640, 480),
    "gif": gif(640, 480),
    "gif 87": gif(640, 480, magic=b"GIF87a", frame=(0, 0, 640, 480)),
    "gif whose frame is larger": gif(1, 400, frame=(40, 80, 600, 400)),
    "gif without colours": b"GIF89a" + struct.pack("<HHBBB", 640, 480, 0, 0, 0) + b"\x2c" + bytes(9),
    "jpeg": jpeg(640, 480),
    "progressive jpeg": jpeg(640, 480, frame=0xC2),
    "jpeg with fill bytes": jpeg(640, 480, extra=b"\xff\xff\xff\xfe\x00\x04ab"),
    "webp lossy": webp(b"VP8 ", b"\x30\x01\x00\x9d\x01\x2a" + struct.pack("<HH", 640, 480)),
    "webp lossless": webp(b"VP8L", b"\x2f" + struct.pack("<I", 639 | 479 << 14) + bytes(8)),
    "webp extended": webp(b"VP8X", bytes(4) + (639).to_bytes(3, "little") + (479).to_bytes(3, "little")),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_size_is_in_the_header(kind: str) -> None:
    """Width and height come from the header bytes, pixels are never decoded."""
    assert image_size(HEADERS[kind]) == (640, 480)


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_cut_anywhere_is_unknown_never_wrong(kind: str) -> None:
    """Any prefix of a header gives its size or None."""
    assert {image_size(HEADERS[kind][:n]) for n in range(len(HEADERS[kind]))} <= {None, (640, 480)}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"not an image", b"\xff\xd8\xff\xda", png(0, 10), b"RIFF" + bytes(40), b"\xff\xd8" + b"\xff\xe0\x00\x00" * 9,
        b"GIF89a" + struct.pack("<HHBBB", 640, 480, 0, 0, 0) + b"\x3b" + bytes(99), b"GIF89a" + b"\x21\xfe" * 99_999,
        b"\xff\xd8" + b"\xff\xe0\x00\x02" * 99_999 + jpeg(640, 480)[2:], b"\xff\xd8" + b"\xff" * 99_999,
    ],
)  # fmt: skip
def test_what_is_no_picture_has_no_size(data: bytes) -> None:
    """Other bytes are unknown."""
    assert image_size(data) is None


KNOWN = [
    ("qwen2_vl", 1024, 1024, 1369),
    ("qwen2_5_vl", 28, 28, 4),
    ("qwen2_5_vl", 20_000, 20_000, 127 * 127),  # the engine's own rounding: 20,000 over its scale is 3583.99...
    ("qwen3_vl", 1024, 1024, 1024),
    ("llava", 4000, 3000, 576),
    ("llava_next", 672, 672, 2928),
    ("gemma3", 800, 800, 260),
    ("pixtral", 1024, 1024, 64 * 64 + 64),
    ("pixtral", 16, 16, 2),
    ("mistral3", 1540, 1540, 55 * 55 + 55),
    ("internvl", 448, 448, 256 + 2),
    ("internvl", 896, 896, 256 * 5 + 2),
    ("mllama", 500, 500, 1),
]


@pytest.mark.parametrize(("family", "width", "height", "tokens"), KNOWN)
def test_tokens_of_a_size(family: str, width: int, height: int, tokens: int) -> None:
    """The family's rule at sizes whose count is published or follows from its formula."""
    assert image_tokens(family, width, height) == tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_unknown_sizes_take_the_maximum(family: str) -> None:
    """A picture whose size is not known, or cannot be, counts as the largest one."""
    rule = FAMILIES[family]
    assert {image_tokens(family, *size) for size in ((None, None), (10, None), (0, 10), (-1, 5), (1 << 31, 5))} == {
        rule.maximum
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_counts_as_much_on_its_side(family: str) -> None:
    """Engines turn it as its EXIF orientation says, which is not read here."""
    sides = [(1024, 512), (197, 1404), (993, 1631), (206, 4706), (2945, 2558)]
    assert all(image_tokens(family, *size) == image_tokens(family, *size[::-1]) for size in sides)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_size_exceeds_the_maximum(family: str) -> None:
    """The maximum is a bound over long, flat and huge pictures."""
    sides = (1, 27, 335, 337, 1000, 4096, 100_000)
    counts = [image_tokens(family, w, h) for w in sides for h in sides]
    assert min(counts) >= 1
    assert max(counts) <= FAMILIES[family].maximum


def test_an_unknown_family_takes_the_largest_maximum() -> None:
    """Nothing is guessed for a family that is not known."""
    assert image_tokens("novel", 10, 10) == image_tokens(None, None, None) == 16_384
