"""Content of messages: which strings are text, which are pictures and files, and what is none of these.

Owns the walk over content parts in every dialect's spelling. Media leaves the message as a placeholder part,
its size read from its own first bytes; base64 is never handed on as text. Nothing here renders a template.
"""

from __future__ import annotations

import base64
import binascii
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

#: Part types that are one picture.
IMAGE_TYPES = frozenset({"image", "image_url", "input_image"})

#: Fields that hold a picture, by URL, data URI or bare base64, in the dialects' spellings.
_IMAGE_FIELDS = ("image_url", "image", "url", "source", "data", "input_image", "file_id")

#: Base64 of this much holds any PNG, GIF or WebP header and most JPEG frame headers.
_HEADER_CHARS = 64 * 1024

#: A bare string this long without a space that decodes as base64 is data, not prose.
_BARE_BASE64_CHARS = 256

#: First characters of base64 JPEG, PNG, GIF, WebP, PDF: data however short.
_BASE64_MAGIC = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "JVBERi0")

IMAGE_PART = {"type": "image"}


@dataclass(slots=True)
class Gathered:
    """What the walk over one request collects beside its text."""

    images: list[ImageInput] = field(default_factory=list)
    unknown_parts: int = 0
    warnings: list[str] = field(default_factory=list)

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
    name = TEXT_TYPES.get(kind) if type(kind) is str else ("text" if "text" in part and kind is None else None)
    if name is not None:
        return _clean_text_part(part, kind, name, gathered)
    if kind in IMAGE_TYPES or (kind is None and "image_url" in part):
        take_image(part, gathered)
        return IMAGE_PART
    return _clean_unknown(part, gathered)


def _clean_text_part(part: dict[str, Json], kind: Json, name: str, gathered: Gathered) -> Json:
    text = part.get(name)
    if type(text) is str and not is_data_uri(text):
        return part if kind == "text" else _text_part(text)
    if text is None:
        return part
    if type(text) is str and _take_media(text, gathered):
        return _text_part("")
    return _text_part(strings_of(text, gathered))


def _clean_unknown(part: dict[str, Json], gathered: Gathered) -> Json:
    """A part of a type we do not know: its text counts as text, its data as pictures or as an unknown part."""
    before = len(gathered.images)
    text = strings_of({key: value for key, value in part.items() if key != "type"}, gathered)
    if len(gathered.images) == before:
        gathered.unknown_parts += 1
        gathered.warn("unknown_content_part")
        return _text_part(text)
    return {"type": "image", "text": text} if text else IMAGE_PART


def _text_part(text: str) -> dict[str, Json]:
    return {"type": "text", "text": text}


def strings_of(root: Json, gathered: Gathered) -> str:
    """All text inside a value, one string per line, in the order of the body; data among it is taken out."""
    found: list[str] = []
    stack = [root]
    while stack:
        value = stack.pop()
        if type(value) is str:
            if not (looks_like_data(value) and _take_media(value, gathered)):
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
    if value.startswith("data:"):
        payload = value[value.find(",") + 1 :] if "," in value[:256] else ""
        return _measured(payload, "data_uri")
    if value.startswith(("http://", "https://")):
        return ImageInput(None, None, 0, "url")
    if looks_like_data(value):
        return _measured(value, "data_uri")
    return ImageInput(None, None, 0, "file" if value else "url")


def _measured(payload: str, source: str) -> ImageInput:
    header = payload[:_HEADER_CHARS]
    try:
        size = image_size(base64.b64decode(header[: len(header) // 4 * 4], validate=False))
    except (binascii.Error, ValueError):
        size = None
    encoded_bytes = len(payload) * 3 // 4 - payload[-2:].count("=")
    return (
        ImageInput(size[0], size[1], encoded_bytes, source) if size else ImageInput(None, None, encoded_bytes, source)
    )


def is_data_uri(text: str) -> bool:
    """Whether the whole string is one base64 data URI."""
    if not text.startswith("data:"):
        return False
    comma = text.find(",", 0, 256)
    return comma > 0 and text[:comma].endswith(";base64") and " " not in text and "\n" not in text[: comma + 80]


def looks_like_data(text: str) -> bool:
    """Whether a string of an unknown field is a data URI or bare base64 rather than text."""
    if is_data_uri(text) or text.startswith(_BASE64_MAGIC):
        return True
    if len(text) < _BARE_BASE64_CHARS or not text.isascii():
        return False
    head = text[:_HEADER_CHARS]
    return head[: len(head) // 4 * 4].translate(_NO_BASE64) == "" and not head.isalpha() and not head.isdigit()


_NO_BASE64 = {ord(c): None for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=\r\n"}


def _take_media(text: str, gathered: Gathered) -> bool:
    """Record data found in a string field as a picture or an unknown file; True as the caller drops the text."""
    image = image_of(text)
    if image.width is None and text.startswith("data:") and not text.startswith("data:image"):
        gathered.unknown_parts += 1
        gathered.warn("data_uri_in_text_field")
    else:
        gathered.images.append(image)
    return True
