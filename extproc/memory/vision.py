"""Input tokens of an image, from its family's rule and the pixel size in its own header.

Owns the token rules of the common vision families and the few header bytes that hold a picture's size; never
decodes a pixel. Where the size is unknown a rule answers with the family's maximum, so the figure stays a bound.
Source of the rules: vllm 0.33.0 model_executor/models/<family>.py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

#: Largest side believed from a header; a PNG may claim 2**31, which no server would decode.
_MAX_SIDE = 1 << 20


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """``tokens(width, height)`` of one image, and the most any image can take.

    ``pad`` is the token that the chat template writes once for a picture and the engine repeats for each of its
    tokens; None where a figure is a bound and not the engine's own.
    """

    name: str
    tokens: Callable[[int, int], int]
    maximum: int
    pad: str | None = None

    def within(self, side: int, min_pixels: int, max_pixels: int) -> VisionFamily:
        """The same family with a processor's own limits on the area and its own ``side`` of one token in pixels."""
        rule, most = _qwen(side, min_pixels, max_pixels), max_pixels // (side * side)
        return replace(self, tokens=rule, maximum=most)


def image_tokens(family: str | None, width: int | None, height: int | None) -> int:
    """Tokens one image adds to the prompt; the family's maximum where the size is unknown or absurd.

    An unknown family (None included) is charged the largest maximum of all families: an upper bound, never a guess.
    """
    rule = FAMILIES.get((family or "").lower())
    return tokens_of(rule, width, height)


def tokens_of(rule: VisionFamily | None, width: int | None, height: int | None) -> int:
    """``image_tokens`` by a rule that is at hand, None: of an unknown family."""
    if rule is None:
        return max(f.maximum for f in FAMILIES.values())
    if not measured(width, height):
        return rule.maximum
    assert width is not None
    assert height is not None
    tokens = rule.tokens(width, height)
    if rule.pad is None:
        # Engines turn a picture as its EXIF orientation says (vllm multimodal/image.py), which is not read here.
        tokens = max(tokens, rule.tokens(height, width))
    return min(rule.maximum, tokens)


def measured(width: int | None, height: int | None) -> bool:
    """Whether a picture's size is known and believable."""
    return width is not None and height is not None and 0 < width <= _MAX_SIDE and 0 < height <= _MAX_SIDE


# --- rules of the families ---------------------------------------------------------------------------------


def _qwen(patch: int, min_pixels: int, max_pixels: int) -> Callable[[int, int], int]:
    """Sides rounded to multiples of ``patch`` (28 = two 14-pixel patches merged), area kept within the limits.

    The operations of transformers' ``smart_resize`` in its order, so that rounding falls the same way.
    """

    def tokens(width: int, height: int) -> int:
        w, h = round(width / patch) * patch, round(height / patch) * patch
        if w * h > max_pixels:
            scale = math.sqrt((height * width) / max_pixels)
            w, h = (max(patch, math.floor(side / scale / patch) * patch) for side in (width, height))
        elif w * h < min_pixels:
            scale = math.sqrt(min_pixels / (height * width))
            w, h = (math.ceil(side * scale / patch) * patch for side in (width, height))
        return (w // patch) * (h // patch)

    return tokens


def _constant(count: int) -> Callable[[int, int], int]:
    return lambda width, height: count


def _best_grid(width: int, height: int, grids: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The tile grid (w, h in pixels) that keeps most of the picture, then wastes least."""

    def fit(grid: tuple[int, int]) -> tuple[int, int]:
        scale = min(grid[0] / width, grid[1] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, -(grid[0] * grid[1] - kept)

    return max(grids, key=fit)


_NEXT_GRIDS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


def _llava_next(width: int, height: int) -> int:
    """576 for the overview, then the unpadded grid of 24 x 24 per tile and one newline token per grid row."""
    grid_w, grid_h = _best_grid(width, height, _NEXT_GRIDS)
    cols, rows = grid_w // 336 * 24, grid_h // 336 * 24
    if width / height > cols / rows:
        kept = int(height * cols / width + 1e-7)
        rows -= 2 * ((rows - kept) // 2)
    else:
        kept = int(width * rows / height + 1e-7)
        cols -= 2 * ((cols - kept) // 2)
    return 576 + rows * cols + rows


def _pixtral(patch: int, longest: int) -> Callable[[int, int], int]:
    """rows x cols patches and one token per row (break, or end for the last); longest side scaled down."""

    def tokens(width: int, height: int) -> int:
        scale = max(width / longest, height / longest, 1.0)
        w, h = int(width / scale + 0.5), int(height / scale + 0.5)
        cols, rows = -(-max(1, w) // patch), -(-max(1, h) // patch)
        return rows * cols + rows

    return tokens


_INTERN_GRIDS = tuple(
    sorted(((i, j) for i in range(1, 13) for j in range(1, 13) if i * j <= 12), key=lambda g: g[0] * g[1])
)


def _internvl(width: int, height: int) -> int:
    """256 per tile of 448 pixels, 1 to 12 tiles by aspect ratio, and a thumbnail where there are several; 2 markers."""
    best, best_diff, area = (1, 1), float("inf"), width * height
    for i, j in _INTERN_GRIDS:
        diff = abs(width / height - i / j)
        if diff < best_diff or (diff == best_diff and area > 0.5 * 448 * 448 * i * j):
            best, best_diff = (i, j), diff
    tiles = best[0] * best[1]
    return 256 * (tiles + (1 if tiles > 1 else 0)) + 2


def _gemma3(width: int, height: int) -> int:
    """256 an image; pan-and-scan adds up to 4 crops of 256 on pictures longer than 1.2 to 1 with crops >= 256 px."""
    long, short = max(width, height), min(width, height)
    crops = 0
    if long / short >= 1.2 and long >= 512:
        crops = min(4, max(2, int(long / short + 0.5)), long // 256)
    return (256 + 4) * (1 + crops)


_LLAMA4_GRIDS = tuple((i * 336, j * 336) for i in range(1, 17) for j in range(1, 17) if i * j <= 16)


def _llama4(width: int, height: int) -> int:
    """144 per 336-pixel tile, up to 16 tiles and an overview; separators and image marks counted."""
    grid_w, grid_h = _best_grid(width, height, _LLAMA4_GRIDS)
    tiles = (grid_w // 336) * (grid_h // 336)
    return 144 * (tiles + (1 if tiles > 1 else 0)) + tiles + 3


_QWEN_PAD = "<|image_pad|>"

FAMILIES: Mapping[str, VisionFamily] = MappingProxyType(
    {
        f.name: f
        for f in (
            # Processor limits: min 56 x 56, max 12,845,056 pixels = 16,384 tokens.
            VisionFamily("qwen2_vl", _qwen(28, 56 * 56, 28 * 28 * 16384), 16384, _QWEN_PAD),
            VisionFamily("qwen2_5_vl", _qwen(28, 56 * 56, 28 * 28 * 16384), 16384, _QWEN_PAD),
            VisionFamily("qwen3_vl", _qwen(32, 256 * 256, 32 * 32 * 16384), 16384, _QWEN_PAD),
            VisionFamily("llava", _constant(576), 576),
            VisionFamily("llava_next", _llava_next, 2928),
            VisionFamily("gemma3", _gemma3, 1300),
            VisionFamily("pixtral", _pixtral(16, 1024), 64 * 64 + 64),
            VisionFamily("mistral3", _pixtral(28, 1540), 55 * 55 + 55),
            VisionFamily("internvl", _internvl, 256 * 13 + 2),
            # Text sees one marker; the 1601 x 4 positions live in cross-attention (geometry kind ``cross``).
            VisionFamily("mllama", _constant(1), 1),
            VisionFamily("llama4", _llama4, 144 * 17 + 16 + 3),
        )
    }
)


# --- picture size from the header --------------------------------------------------------------------------


def image_size(header: bytes) -> tuple[int, int] | None:
    """(width, height) of a PNG, JPEG, WebP or GIF from its first bytes; None where they do not say.

    About 32 bytes suffice for PNG, GIF and WebP; a JPEG's frame header comes after its metadata, so the more bytes
    are given the likelier it is found.
    """
    for magic, reader in _READERS:
        if header.startswith(magic):
            size = reader(header)
            return size if size and size[0] > 0 and size[1] > 0 else None
    return None


def _steps(data: bytes) -> range:
    """Blocks to look at before the one that has the size: those of real pictures are larger by far than 32 bytes in the
    mean, and thousands of empty ones would take longer than all else in a request.
    """
    return range(64 + len(data) // 32)


def _png(data: bytes) -> tuple[int, int] | None:
    if len(data) < 24 or data[12:16] != b"IHDR":
        return None
    width, height = struct.unpack(">II", data[16:24])
    return width, height


#: What begins a block of a GIF: an extension, a frame.
_GIF_EXTENSION, _GIF_FRAME = 0x21, 0x2C


def _gif(data: bytes) -> tuple[int, int] | None:
    """The screen, or what the first frame needs where that is larger: decoders grow the screen to it."""
    if len(data) < 13:
        return None
    width, height, packed = struct.unpack("<HHB", data[6:11])
    at = 13 + (3 << (packed & 7) + 1 if packed & 0x80 else 0)
    within = False
    for _ in _steps(data):
        if at + 10 > len(data):
            return None
        if within:  # the blocks of an extension, each with its length, an empty one at the end
            within = data[at] > 0
            at += 1 + data[at]
        elif data[at] == _GIF_EXTENSION:
            within, at = True, at + 2
        elif data[at] == _GIF_FRAME:
            left, top, across, down = struct.unpack("<HHHH", data[at + 1 : at + 9])
            return max(width, left + across), max(height, top + down)
        else:
            return None
    return None


def _webp(data: bytes) -> tuple[int, int] | None:
    if len(data) < 30 or data[8:12] != b"WEBP":
        return None
    chunk = data[12:16]
    if chunk == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if chunk == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", data[26:30])
        return width & 0x3FFF, height & 0x3FFF
    return None


#: Start-of-frame markers; C4, C8 and CC look alike and are tables or reserved.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def _jpeg(data: bytes) -> tuple[int, int] | None:
    at, size = 2, len(data)
    for _ in _steps(data):
        if at + 4 > size or data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # markers without a length
            at += 2
            continue
        if marker in (0xD9, 0xDA):  # the picture's data began or ended without a frame header
            return None
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in _JPEG_FRAMES:
            if at + 9 > size:
                return None
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return width, height
        if length < 2:
            return None
        at += 2 + length
    return None


_READERS: tuple[tuple[bytes, Callable[[bytes], tuple[int, int] | None]], ...] = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8", _jpeg),
    (b"GIF87a", _gif),
    (b"GIF89a", _gif),
    (b"RIFF", _webp),
)
