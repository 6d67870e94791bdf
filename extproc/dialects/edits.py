"""Edits of a body that touch nothing but the span concerned.

The body is never serialised again: order, spacing, big numbers and lone surrogates survive. All offsets come
from the parse of the same bytes.
"""

from __future__ import annotations

import json

from extproc.dialects.model import EditedBody, EditPoints, InferenceRequest, Span

#: One replacement: the span of the old bytes and the new ones.
Change = tuple[Span, bytes]


def edit(
    body: bytes,
    request: InferenceRequest,
    *,
    cap: int | None = None,
    include_usage: bool = False,
    model: str | None = None,
) -> EditedBody:
    """``body`` with the output capped, the usage asked for, or the model renamed; the same object if nothing changes.

    ``cap`` lowers every cap present that is larger or unlimited and writes the dialect's own name if it is
    missing. ``include_usage`` acts on streams only. ``body`` must be the bytes that ``request`` was parsed from.
    """
    points = request.edit
    changes: list[Change] = []
    inserts: list[bytes] = []
    if cap is not None:
        _cap(points, body, cap, changes, inserts)
    if include_usage and request.stream and not request.include_usage_asked:
        _usage(points, body, changes, inserts)
    name = json.dumps(model).encode() if model is not None else None
    if name is not None and points.model is not None:
        changes.append((points.model, name))
    elif name is not None:
        inserts.append(b'"model":' + name)
    if inserts:
        text = b",".join(inserts) + (b"" if points.empty else b",")
        changes.append(((points.start, points.start), text))
    return _apply(body, changes, points, name, inserts)


def _cap(points: EditPoints, body: bytes, cap: int, changes: list[Change], inserts: list[bytes]) -> None:
    digits = str(cap).encode()
    native = ".".join(points.cap_path)
    written = False
    for found in points.caps:
        if found.value is None or found.value > cap:
            # A foreign name without a limit is left alone: some engine reads it as "unlimited", ours does not.
            changes.append((found.span, digits))
        written = written or found.name == native
    if written or not points.cap_path:
        return
    missing = points.cap_path[points.outer_depth :]
    member = b'"' + missing[-1].encode() + b'":' + digits
    for name in reversed(missing[:-1]):
        member = b'"' + name.encode() + b'":{' + member + b"}"
    if not points.outers:
        inserts.append(member)
    changes += [_into(span, member, body) for span in points.outers]


def _usage(points: EditPoints, body: bytes, changes: list[Change], inserts: list[bytes]) -> None:
    if points.include_usage is not None:
        changes.append((points.include_usage, b"true"))
    elif points.stream_options is not None:
        changes.append(_into(points.stream_options, b'"include_usage":true', body))
    else:
        inserts.append(b'"stream_options":{"include_usage":true}')


def _into(span: Span, member: bytes, body: bytes) -> Change:
    """The change that puts ``member`` into the object at ``span``, or an object in place of the null there."""
    begin, end = span
    if body[begin : begin + 1] != b"{":
        return span, b"{" + member + b"}"
    empty = not body[begin + 1 : end - 1].strip()
    return (begin + 1, begin + 1), member + (b"" if empty else b",")


def _apply(
    body: bytes, changes: list[Change], points: EditPoints, name: bytes | None, inserts: list[bytes]
) -> EditedBody:
    if not changes:
        return EditedBody(body, points.model)
    changes.sort(key=lambda change: change[0])
    pieces: list[bytes] = []
    position = shift = 0
    for (begin, end), new in changes:
        pieces += (body[position:begin], new)
        position = end
        if points.model is not None and end <= points.model[0]:
            shift += len(new) - (end - begin)
    pieces.append(body[position:])
    out = b"".join(pieces)
    if points.model is not None:
        start = points.model[0] + shift
        length = len(name) if name is not None else points.model[1] - points.model[0]
        return EditedBody(out, (start, start + length))
    if name is None:
        return EditedBody(out, None)
    # The model is the last thing inserted behind the opening brace.
    start = points.start + len(b",".join(inserts)) - len(name)
    return EditedBody(out, (start, start + len(name)))
