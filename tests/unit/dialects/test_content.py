"""Pictures, files and unknown parts: found wherever they hide, never counted as text."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from extproc.dialects.content import Gathered, clean, is_data_uri, is_picture
from extproc.types import ImageInput
from tests.unit.dialects.asking import chat_prompt, request


def png(width: int, height: int) -> str:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"\0" * 900
    return base64.b64encode(data).decode()


PNG = png(320, 240)
URI = "data:image/png;base64," + PNG


def cleaned(content: Any) -> tuple[Any, Gathered]:
    gathered = Gathered()
    return clean(content, gathered), gathered


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URI}},
        {"type": "image_url", "image_url": URI},
        {"type": "image", "image": URI},
        {"type": "image", "image": PNG},
        {"type": "input_image", "image_url": URI, "detail": "auto"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        {"image_url": {"url": URI}},
        {"image": URI},
        {"type": "text", "text": "", "uuid": "u", "image_url": URI},
        {"type": "image_url", "image_url": {"url": " DATA:image/png;BASE64," + PNG}},
        {"type": "picture", "payload": {"inner": [URI]}},
        {"type": "picture", "blob": PNG},
        {"type": "picture", "blob": "data:image;base64," + PNG},
        {"type": "text", "text": URI},
        URI,
    ],
)
def test_a_picture_is_found_in_every_spelling(part: Any) -> None:
    """Its size comes from its own header; no base64 is left to be counted as text."""
    content, gathered = cleaned([part])
    assert [(i.width, i.height) for i in gathered.images] == [(320, 240)]
    assert len(str(content)) < 200


def test_a_string_that_is_a_data_uri_is_a_picture() -> None:
    """Even as a message's whole content."""
    content, gathered = cleaned(URI)
    assert (content, len(gathered.images)) == ("", 1)


def test_text_that_mentions_a_data_uri_stays_text() -> None:
    """The engine tokenises it, so it counts as what it is."""
    text = f"see {URI} there"
    content, gathered = cleaned(text)
    assert content is text
    assert not gathered.images


def wrapped(text: str, width: int = 76) -> str:
    return "\r\n".join(text[n : n + width] for n in range(0, len(text), width)) + "\r\n"


def escaped(text: str) -> str:
    return text.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")


@pytest.mark.parametrize("spelled", [str, wrapped, escaped, lambda b64: b64.translate(str.maketrans("+/", "-_"))])
@pytest.mark.parametrize("size", [(320, 240), (64_030, 22_140), (12_931, 33_662), (62_318, 16_379)])
def test_base64_in_any_spelling_has_the_pictures_own_size(spelled: Callable[[str], str], size: tuple[int, int]) -> None:
    """URL-safe, wrapped or percent-encoded: decoders that drop what they do not know read other sizes from these."""
    bare = png(*size)
    _, gathered = cleaned([{"type": "image_url", "image_url": "data:image/png;base64," + spelled(bare)}])
    found = ImageInput(*size, len(base64.b64decode(bare)), "data_uri")
    assert gathered.images == [found]


@pytest.mark.parametrize("spelled", [lambda b64: b64.replace("+", " "), lambda b64: b64[:24] + "!" + b64[24:]])
def test_what_breaks_base64_hides_the_size(spelled: Callable[[str], str]) -> None:
    """A blank or a foreign character before the size: unknown, never another size."""
    _, gathered = cleaned([{"type": "image", "image": "data:image/png;base64," + spelled(png(64_030, 22_140))}])
    assert [(i.width, i.height) for i in gathered.images] == [(None, None)]


@pytest.mark.parametrize("spelled", [str, wrapped])
def test_a_photo_with_much_before_its_frame_has_a_size(spelled: Callable[[str], str]) -> None:
    """Cameras and colour profiles put hundreds of kilobytes there."""
    profile = b"\xff\xe2" + struct.pack(">H", 60_002) + bytes(60_000)
    photo = b"\xff\xd8" + profile * 9 + b"\xff\xc2" + struct.pack(">HBHHB", 17, 8, 480, 640, 3) + bytes(900)
    _, gathered = cleaned([{"type": "image", "image": spelled(base64.b64encode(photo).decode())}])
    assert gathered.images == [ImageInput(640, 480, len(photo), "data_uri")]


@pytest.mark.parametrize("embeds", ["QUJD" * 9000, {"image_embeds": "QUJD" * 9000, "image_grid_thw": "QUJD" * 20}])
@pytest.mark.parametrize("typed", [{"type": "image_embeds"}, {}])
def test_an_encoded_picture_is_a_picture(embeds: Any, typed: dict[str, str]) -> None:
    """vLLM's image_embeds: of no known size, and no text."""
    content, gathered = cleaned([{**typed, "image_embeds": embeds}])
    assert (content, [(i.width, i.height) for i in gathered.images]) == ([{"type": "image"}], [(None, None)])


def test_text_beside_a_picture_without_type_counts() -> None:
    """Both are charged: engines differ in which of them they take."""
    content, gathered = cleaned([{"image_url": "https://example.test/a.png", "text": "a cube"}])
    assert (content, len(gathered.images)) == ([{"type": "image", "text": "a cube"}], 1)


@pytest.mark.parametrize(
    "url",
    ["https://example.test/a.png", "http://x/y", "HTTPS://Example.test/a.png", "\n https://example.test/a.png"],
)
def test_a_remote_picture_has_no_size(url: str) -> None:
    """It is charged the model's maximum later."""
    _, gathered = cleaned([{"type": "image_url", "image_url": {"url": url}}])
    assert gathered.images == [ImageInput(None, None, 0, "url")]


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,!!!!", "data:image/png;base64,", "data:,", "data:", "", "x" * 40]
)
def test_a_broken_picture_is_still_one_picture(url: str) -> None:
    """No header, no size; never an error, never text."""
    _, gathered = cleaned([{"type": "image_url", "image_url": {"url": url}}])
    assert [(i.width, i.height) for i in gathered.images] == [(None, None)]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "AAAA" * 200 + "AB1=", "format": "wav"}},
        {"type": "file", "file": {"filename": "notes.pdf"}},
        {"type": "hologram", "depth": 3},
        7,
        None,
    ],
)
def test_an_unknown_part_is_charged_and_said(part: Any) -> None:
    """Parts that we do not know cost a configured amount each."""
    _, gathered = cleaned([part])
    assert gathered.unknown_parts + len(gathered.images) == 1


def test_text_beside_data_in_an_unknown_part_counts() -> None:
    """Captions are text."""
    content, _ = cleaned([{"type": "hologram", "caption": "a red cube"}])
    assert content == [{"type": "text", "text": "a red cube"}]


def test_content_without_media_is_the_same_object() -> None:
    """Nothing is copied for the common request."""
    content = [{"type": "text", "text": "hello"}, "world"]
    assert cleaned(content)[0] is content


def test_an_object_in_place_of_a_list_is_one_part() -> None:
    """Not legal, but seen; the engine decides."""
    assert cleaned({"type": "text", "text": "hello"})[0] == [{"type": "text", "text": "hello"}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PNG, True),
        (PNG.rstrip("="), True),
        (PNG[:120], False),
        (PNG[:400] + "\n" + PNG[400:], False),
        (PNG + " and words", False),
        ("iVBORw0KGgo" + "A" * 400, False),
        ("/9j/" + "prose" * 400, False),
        ("\n".join(f"{number:064x}" for number in range(2000)), False),
        (f"{7**2000:x}", False),
        (URI, False),
        ("a" * 5000, False),
    ],
)
def test_bare_base64_is_a_picture_only_where_it_proves_to_be(text: str, expected: bool) -> None:
    """First bytes, a size, and nothing but base64 on one line: checksums, keys and prose are text."""
    assert is_picture(text) is expected


@pytest.mark.parametrize(
    "text",
    [
        "data:text/plain,hello",
        "data: not a uri",
        "see data:image/png;base64,AAAA",
        "data:a;base64,AAAA",
        "data:;base64,AAAA",
        "data:image/png;base64," + "\u6f22\u5b57" * 2000,
        "data:image/png;base64," + "AAAA" * 100 + " and then a story",
        "data:image/png;base64," + "AAAA\n" * 100,
        "data:image/png;base64,AAAA====",
        "data:ima ge/png;base64,AAAA",
        "data:image/png;x;base64,AAAA",
    ],
)
def test_what_is_no_data_uri(text: str) -> None:
    """A media type and base64 to the end; anything else is text and counts as such."""
    assert not is_data_uri(text)
    content, gathered = cleaned([{"type": "text", "text": text}])
    assert content[0]["text"] == text
    assert (gathered.images, gathered.unknown_parts) == ([], 0)


@pytest.mark.parametrize(
    "text",
    [
        "data:image/svg+xml;charset=utf-8;base64,AAAA",
        "data:application/pdf;base64,JVBERi0x",
        "data:text/plain;base64,-_==",
        "data:image;base64,/9j/4AAQ",
        "data:audio;codecs=opus;base64,T2dn",
    ],
)
def test_what_is_a_data_uri(text: str) -> None:
    """Parameters and both alphabets of base64 belong to it."""
    assert is_data_uri(text)


WAV = "UklGRiQAAABXQVZFZm10IBAAAAABAAEA" + "AB+9" * 300


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "https://example.test/a.wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64," + WAV}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + WAV}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0x"}},
        {"type": "input_file", "file_data": "JVBERi0x" * 200, "filename": "a.pdf"},
        {"type": "hologram", "payload": "data:model/gltf;base64,AAAA"},
        {"type": "audio_embeds", "audio_embeds": "AAAA" * 200},
        {"type": "prompt_embeds", "data": "AAAA" * 200},
        {"input_audio": {"data": WAV, "format": "wav"}},
        {"video_url": {"url": "https://example.test/a.mp4"}},
        {"type": "text", "text": "", "uuid": "u", "audio_url": "https://example.test/a.wav"},
    ],
)
def test_sound_film_and_files_are_one_unknown_part(part: dict[str, Any]) -> None:
    """Charged once, no picture, and nothing of the data is text."""
    content, gathered = cleaned([part])
    assert (gathered.images, gathered.unknown_parts) == ([], 1)
    assert content == [{"type": "text", "text": ""}]


def test_pictures_in_tool_results_of_both_apis() -> None:
    """A screenshot that a tool returns is a picture in either dialect."""
    anthropic = {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": [
                            {"type": "text", "text": "shot"},
                            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
                        ],
                    }
                ],
            }
        ],
        "max_tokens": 5,
    }
    responses = {
        "input": [
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URI}]}
        ]
    }
    for path, body in (("/v1/messages", anthropic), ("/v1/responses", responses)):
        found = request(path, body)
        assert [(i.width, i.height) for i in found.images] == [(320, 240)]
        assert "iVBOR" not in str(chat_prompt(path, body).messages)
