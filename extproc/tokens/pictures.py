"""Tokens of pictures in a prompt: the engine's own figure where its rule and the picture's size are known, else a bound.

Owns the choice between rule, configured figure and maximum. The rules themselves are ``memory.vision``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from extproc.dialects.model import InferenceRequest
from extproc.memory.vision import FAMILIES, VisionFamily, measured, tokens_of
from extproc.tokens.bound import PER_PART
from extproc.types import ImageInput


@dataclass(frozen=True, slots=True)
class PictureRule:
    """How one model's pictures are charged.

    ``family`` is None where the model's is not known; ``flat`` is the operator's figure for a picture whose own cannot
    be known, in place of the family's maximum.
    """

    family: VisionFamily | None = None
    flat: int | None = None

    @property
    def pad(self) -> str | None:
        """The token that stands once for every picture in the rendered prompt; None where none is known."""
        return self.family.pad if self.family is not None else None

    def exact(self, request: InferenceRequest) -> int | None:
        """Tokens of a request's pictures as the engine counts them; None where one of them cannot be known."""
        family = self.family
        if not request.images:
            return 0
        if family is None or family.pad is None or request.picture_tokens_asked:
            return None
        if not all(measured(image.width, image.height) for image in request.images):
            return None
        return sum(tokens_of(family, image.width, image.height) for image in request.images)

    def most(self, request: InferenceRequest) -> int:
        """Tokens that a request's pictures take at most, the marks around each included."""
        return sum(self._most_of(image, request.picture_tokens_asked) for image in request.images)

    def _most_of(self, image: ImageInput, asked: int) -> int:
        if asked:
            # The client's own limits are in force: at most one token of 14 x 14 pixels, whatever the family.
            asked = max(asked, (image.width or 0) * (image.height or 0) // (14 * 14))
        known = self.family is not None and measured(image.width, image.height)
        if self.flat is not None and not known:
            return max(asked, self.flat) + PER_PART
        return max(asked, tokens_of(self.family, image.width, image.height)) + PER_PART


#: Nothing known: the largest maximum of all families.
UNKNOWN_PICTURES = PictureRule()


def picture_rule(name: str | None, processor: Mapping[str, Any], flat: int | None = None) -> PictureRule:
    """The rule of the vision family ``name`` under the settings of its ``preprocessor_config.json`` ({}: as published).

    Settings that do not say what this family's processor does make its figures bounds.
    """
    family = FAMILIES.get((name or "").lower())
    if family is None or family.pad is None or not processor:
        return PictureRule(family, flat)
    limits = _pixel_limits(processor)
    return PictureRule(replace(family, pad=None) if limits is None else family.within(*limits), flat)


def _pixel_limits(processor: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """(pixels of a token's side, least area, largest area); ``min_pixels`` and ``max_pixels`` win over ``size``."""
    size = processor.get("size")
    edges = size if isinstance(size, dict) else {}
    figures = (
        processor.get("patch_size"),
        processor.get("merge_size"),
        processor.get("min_pixels") or edges.get("shortest_edge"),
        processor.get("max_pixels") or edges.get("longest_edge"),
    )
    known = [figure for figure in figures if type(figure) is int and figure > 0]
    if len(known) < len(figures) or processor.get("do_resize") is False:
        return None
    patch, merge, least, most = known
    return patch * merge, least, most
