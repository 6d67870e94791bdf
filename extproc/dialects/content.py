"""Content of messages: which strings are text, which are pictures and files, and what is none of these.

Owns the walk over content parts in every dialect's spelling. Media leaves the message as a placeholder part,
its size read from its own first bytes; base64 is never handed on as text. Nothing here renders a template.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field

from extproc.dialects.model import Json
from extproc.memory.vision import image_size
from extproc.types import ImageInput

#: Part types whose text an engine puts into the prompt -> the field that holds it.
TEXT_TYPES = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}

#: Part types that are one picture; ``image_embeds`` is one that the client has encoded for the model already (vLLM).
IMAGE_TYPES = frozenset({"image", "image_url", "input_image", "image_embeds"})

#: Fields that hold a picture, by URL, data URI or bare base64, in the dialects' spellings.
_IMAGE_FIELDS = ("image_url", "image", "url", "source", "data", "input_image", "image_embeds", "file_id")

#: Part types that carry sound, film or a file -> nothing of theirs is text but what stands beside the data.
_FILE_TYPES = frozenset(
    {
        *("input_audio", "audio_url", "audio", "audio_embeds", "video_url", "video", "input_video", "video_embeds"),
        *("file", "input_file", "file_url", "prompt_embeds"),
    }
)

#: Fields that say what a part is where its ``type`` is missing or stands beside a ``uuid`` (vLLM
#: renderers/chat_utils.py), in the order in which they are looked for.
_TELLING_FIELDS = (
    *("image_url", "image", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"),
    *("audio_url", "input_audio", "video_url"),
)

#: Fields that hold the data of such a part, or say where it lies and what it is.
_FILE_FIELDS = _FILE_TYPES | {
    "type",
    "encrypted_content",
    "data",
    "url",
    "source",
    "file_id",
    "file_data",
    "filename",
    "format",
    "uuid",
}

#: No text: what a part is, and what only the service that made it can read.
_SILENT_FIELDS = frozenset({"type", "encrypted_content", "signature"})

#: Base64 of this much holds any PNG, GIF or WebP header and most JPEG frame headers; of the other, a JPEG's behind
#: whatever a camera or a colour profile puts before it.
_HEADER_CHARS, _METADATA_CHARS = 64 * 1024, 2 * 1024 * 1024

#: What percent-encoding makes of base64 and its line breaks.
_ESCAPES = ((b"%2B", b"+"), (b"%2b", b"+"), (b"%2F", b"/"), (b"%2f", b"/"), (b"%0D", b""), (b"%0A", b""))

#: Bare base64 shorter than this is no picture that anybody sends; as text it costs little.
_BARE_BASE64_CHARS = 256

#: First characters of base64 JPEG (in either alphabet), PNG, GIF and WebP.
_JPEG_MAGIC = ("/9j/", "_9j_")
_BASE64_MAGIC = (*_JPEG_MAGIC, "iVBORw0KGgo", "R0lGOD", "UklGR")

#: The head of a data URI (RFC 2397) with a media type (RFC 6838 names) and base64 after it; clients leave out the
#: subtype of pictures, sound and film.
_DATA_URI_HEAD = re.compile(
    r"data:(?:image|audio|video|[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*)"
    r"(?:;[A-Za-z0-9!#$&^_.+-]+=[A-Za-z0-9!#$&^_.+-]+)*;base64,"
)

#: Characters of base64 in both alphabets (RFC 4648).
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_"

#: The URL-safe alphabet of base64 to the plain one, and what base64 may be wrapped with (RFC 2045).
_PLAIN_BASE64, _WRAPPING = bytes.maketrans(b"-_", b"+/"), b"\t\r\n"
_BASE64_RUN = re.compile(rb"[A-Za-z0-9+/]*+")

IMAGE_PART = {"type": "image"}

#: A part that names a deferred tool, whose definition a template may write in its place.
TOOL_REFERENCE = "tool_reference"


@dataclass(slots=True)
class Gathered:
    """What the walk over one request collects beside its text.

    ``hidden`` counts texts of the prompt that the body does not show (earlier turns that the engine keeps). ``loose`` says
    that engines differ in what they make of something in it, so that no rendered count is theirs.
    """

    images: list[ImageInput] = field(default_factory=list)
    unknown_parts: int = 0
    hidden: int = 0
    loose: bool = False
    warnings: list[str] = field(default_factory=list)

    def hide(self, warning: str) -> None:
        """Note that the prompt holds more than the body shows."""
        self.hidden += 1
        self.warn(warning)

    def warn(self, warning: str) -> None:
        """Note a warning once."""
        if warning not in self.warnings:
            self.warnings.append(warning)


def clean(content: Json, gathered: Gathered) -> Json:
    """Message content with its media replaced by placeholders; the same object where there is none.

    A string that is a data URI as a whole is media; one that merely contains a data URI is text, because the
    engine will tokenise it. An object in place of a list counts as its one part (the engine decides).
    """
    if type(content) is str:
        return "" if is_data_uri(content) and _take_media(content, gathered) else content
    if type(content) is dict:
        gathered.warn("content_object")
        return clean([content], gathered)
    if type(content) is not list:
        return content
    cleaned: list[Json] | None = None
    for index, part in enumerate(content):
        new = _clean_part(part, gathered)
        if new is not part and cleaned is None:
            cleaned = content[:index]
        if cleaned is not None:
            cleaned.append(new)
    return content if cleaned is None else cleaned


def kind_of(part: Json) -> str | None:
    """The ``type`` of a part, block or item: None where absent, "" (no kind that anybody knows) where it is no string."""
    kind = part.get("type") if type(part) is dict else None
    return kind if kind is None or type(kind) is str else ""


def text_of(part: Json) -> str:
    """The text of a cleaned part, "" where it has none."""
    text = part.get("text") if type(part) is dict else part
    return text if type(text) is str else ""


def _clean_part(part: Json, gathered: Gathered) -> Json:
    if type(part) is str:
        return _text_part("") if is_data_uri(part) and _take_media(part, gathered) else part
    if type(part) is not dict:
        gathered.unknown_parts += 1
        return _text_part(strings_of(part, gathered))
    kind = kind_of(part)
    if kind is None or "uuid" in part:
        kind = next((name for name in _TELLING_FIELDS if name in part), kind)
    name = TEXT_TYPES.get(kind) if type(kind) is str else ("text" if "text" in part and kind is None else None)
    if name is not None:
        return _clean_text_part(part, kind, name, gathered)
    if kind in IMAGE_TYPES:
        take_image(part, gathered)
        return IMAGE_PART if type(part.get("text")) is not str else {"type": "image", "text": part["text"]}
    if kind == TOOL_REFERENCE and type(part.get("name")) is str:
        return part
    return _clean_unknown(part, kind, gathered)


def _clean_text_part(part: dict[str, Json], kind: Json, name: str, gathered: Gathered) -> Json:
    text = part.get(name)
    if type(text) is str and not is_data_uri(text):
        return part if kind == "text" else _text_part(text)
    if text is None:
        return part
    if type(text) is str and _take_media(text, gathered):
        return _text_part("")
    return _text_part(strings_of(text, gathered))


def _clean_unknown(part: dict[str, Json], kind: str | None, gathered: Gathered) -> Json:
    """A part of a type we do not know: its text counts as text, its pictures as such, anything else charged once."""
    images, unknown = len(gathered.images), gathered.unknown_parts
    text = text_beside(part, kind, gathered)
    if len(gathered.images) == images:
        gathered.unknown_parts = unknown + 1
        gathered.warn("unknown_content_part")
        return _text_part(text)
    return {"type": "image", "text": text} if text else IMAGE_PART


def text_beside(part: dict[str, Json], kind: str | None, gathered: Gathered) -> str:
    """The text of a part or item whose kind says nothing to us, without its type and what is encoded for others."""
    apart = _FILE_FIELDS if kind in _FILE_TYPES else _SILENT_FIELDS
    return strings_of({key: value for key, value in part.items() if key not in apart}, gathered)


def _text_part(text: str) -> dict[str, Json]:
    return {"type": "text", "text": text}


def strings_of(root: Json, gathered: Gathered) -> str:
    """All text inside a value, one string per line, in the order of the body; data among it is taken out."""
    found: list[str] = []
    stack = [root]
    while stack:
        value = stack.pop()
        if type(value) is str:
            if not ((is_data_uri(value) or is_picture(value)) and _take_media(value, gathered)):
                found.append(value)
        elif type(value) is list:
            stack.extend(reversed(value))
        elif type(value) is dict:
            stack.extend(reversed(value.values()))
    return "\n".join(found)


def take_image(part: dict[str, Json], gathered: Gathered) -> None:
    """Record the picture of an image part, whichever field and nesting holds it."""
    value: Json = part
    while type(value) is dict:
        value = next((value[name] for name in _IMAGE_FIELDS if value.get(name) is not None), None)
    gathered.images.append(image_of(value if type(value) is str else ""))


def image_of(value: str) -> ImageInput:
    """The picture behind a data URI, bare base64, URL or file id: its size where its bytes are at hand."""
    # Engines read the scheme as URLs have it: blanks before it and its case do not matter.
    start = value[:64].lstrip()[:8].lower()
    if start.startswith("data:"):
        payload = value[value.find(",") + 1 :].lstrip() if "," in value[:256] else ""
        return _measured(payload)
    if start.startswith(("http://", "https://")):
        return ImageInput(None, None, 0, "url")
    if value.startswith(_BASE64_MAGIC) or (len(value) >= _BARE_BASE64_CHARS and _is_base64(value, 0)):
        return _measured(value)
    return ImageInput(None, None, 0, "file" if value else "url")


def _measured(payload: str) -> ImageInput:
    """The picture in base64 of either alphabet, wrapped or percent-encoded too: engines differ in what they take."""
    size = image_size(_decoded(payload[:_HEADER_CHARS]))
    if size is None and len(payload) > _HEADER_CHARS and payload.startswith(_JPEG_MAGIC):
        size = image_size(_decoded(payload[:_METADATA_CHARS]))
    width, height = size or (None, None)
    return ImageInput(width, height, _bytes_in(payload), "data_uri")


def _decoded(header: str) -> bytes:
    """The bytes up to the first character that is no base64."""
    data = header.encode("ascii", "replace")
    if b"%" in data:
        for escape, character in _ESCAPES:
            data = data.replace(escape, character)
    run = _BASE64_RUN.match(data.translate(_PLAIN_BASE64, _WRAPPING))
    plain = run.group() if run else b""
    return base64.b64decode(plain[: len(plain) // 4 * 4])


def _bytes_in(payload: str) -> int:
    """Bytes that base64 stands for. What wraps or escapes it is looked for where the first of it would stand."""
    chars, start = len(payload), payload[:_HEADER_CHARS]
    for mark in "\t\r\n":
        if mark in start or payload.endswith(mark):
            chars -= payload.count(mark)
    ending = payload[-16:].replace("%3D", "=").rstrip()
    if "%" in start:
        chars -= 2 * payload.count("%")
    return chars * 3 // 4 - ending[-2:].count("=")


def is_data_uri(text: str) -> bool:
    """Whether the whole string is one base64 data URI: a well-formed media type and nothing but base64 behind it.

    Anything else is text, however it begins: an engine that is given it as text makes tokens of all of it.
    """
    if not text.startswith("data:") or not text.isascii():
        return False
    head = _DATA_URI_HEAD.match(text, 0, 256)
    return head is not None and _is_base64(text, head.end())


def is_picture(text: str) -> bool:
    """Whether the whole string is bare base64 of a picture: the first bytes and the size of one, nothing else behind."""
    if len(text) < _BARE_BASE64_CHARS or not text.startswith(_BASE64_MAGIC) or not text.isascii():
        return False
    return _is_base64(text, 0) and _measured(text).width is not None


def _is_base64(text: str, start: int) -> bool:
    """Whether everything from ``start`` is base64 on one line, padded or not."""
    if not text.isascii():
        return False
    end = len(text)
    while end > start and len(text) - end < 2 and text[end - 1] == "=":
        end -= 1
    return not text[start:end].encode("ascii").translate(None, _BASE64)


def _take_media(text: str, gathered: Gathered) -> bool:
    """Record data found in a string field as a picture or an unknown file; True as the caller drops the text."""
    image = image_of(text)
    if image.width is None and not text.startswith(("data:image/", "data:image;")):
        gathered.unknown_parts += 1
        gathered.warn("data_uri_in_text_field")
    else:
        gathered.images.append(image)
    return True
