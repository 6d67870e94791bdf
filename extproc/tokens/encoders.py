"""Tokenizers behind one face: how many tokens has this text.

fastokens does the work where it is exact for the tokenizer at hand, which is checked against HF ``tokenizers``
on a sample set at load; otherwise HF does it. Both release the GIL while they work. Texts over a mebibyte are
cut at places where no pre-tokenizer joins, so that no single call runs long.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import fastokens  # type: ignore[import-untyped]
import tokenizers

from extproc.errors import ConfigError
from extproc.tokens.samples import SAMPLES

#: Characters per call: about a millisecond of work, and of holding the GIL for the result.
CHUNK_CHARS = 256 * 1024

#: Memory for remembered segments between added tokens (fastokens' own exact cache).
SEGMENT_CACHE_BYTES = 32 * 1024 * 1024


class EncoderFailure(Exception):
    """The native tokenizer failed on a text; the bound answers."""


class Encoder(Protocol):
    """Counts tokens; ``name`` says which library does it."""

    name: str

    def count(self, text: str, *, add_special_tokens: bool) -> int:
        """Tokens of ``text``. Raises EncoderFailure."""
        ...

    def remembered_bytes(self) -> int:
        """Memory of remembered segments, at most ``SEGMENT_CACHE_BYTES``."""
        ...


class FastEncoder:
    """fastokens: results stay in one native buffer, no Python object per token."""

    name = "fastokens"

    def __init__(self, native: fastokens.Tokenizer) -> None:
        self._native = native

    def count(self, text: str, *, add_special_tokens: bool) -> int:
        """Tokens of ``text``, read off the length of the id buffer (4 bytes each)."""
        return _guarded(lambda t: len(self._native.encode_batch_flat([t], add_special_tokens)[0]) // 4, text)

    def remembered_bytes(self) -> int:
        """What the segment cache holds now."""
        stats = self._native.segment_cache_stats()
        return int(stats["bytes"]) if stats else 0


class HfEncoder:
    """HF tokenizers; ``encode_batch_fast`` because ``encode`` holds the GIL throughout."""

    name = "tokenizers"

    def __init__(self, native: tokenizers.Tokenizer) -> None:
        self._native = native

    def count(self, text: str, *, add_special_tokens: bool) -> int:
        """Tokens of ``text``."""

        def call(t: str) -> int:
            return len(self._native.encode_batch_fast([t], add_special_tokens=add_special_tokens)[0])

        return _guarded(call, text)

    def remembered_bytes(self) -> int:
        """Nothing of ours; HF's own word cache holds 10,000 entries."""
        return 0


def _guarded(call: Callable[[str], int], text: str) -> int:
    """Run a native call: a lone surrogate becomes U+FFFD, a Rust panic becomes EncoderFailure."""
    try:
        return call(text)
    except UnicodeEncodeError:
        return _guarded(call, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except Exception as error:
        raise EncoderFailure(type(error).__name__) from error
    except BaseException as error:
        # pyo3's PanicException derives from BaseException so that nobody swallows it by accident; here a panic
        # on one text must cost no more than exactness.
        if type(error).__name__ != "PanicException":
            raise
        raise EncoderFailure("PanicException") from error


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A loaded tokenizer and what is known of it.

    ``max_token_bytes`` is the longest token in bytes (a text of n bytes has at least n / that many tokens);
    ``byte_level`` says that it emits at most one token per UTF-8 byte of the normalised text; ``cuttable`` that
    counts add up over cuts at line starts; ``specials`` are the contents of its added tokens; ``prompt_specials`` is how
    many it puts around a prompt, ``pair_specials`` around a pair of texts in one (cross-encoders); ``note`` says
    why the fast encoder is not used, if so.
    """

    encoder: Encoder
    max_token_bytes: int
    byte_level: bool
    cuttable: bool
    specials: frozenset[str]
    prompt_specials: int
    pair_specials: int = 0
    note: str | None = None

    def count(self, text: str, *, add_special_tokens: bool, tick: Callable[[int], None] = lambda _: None) -> int:
        """Tokens of ``text``; ``tick`` sees the count so far between cuts and may raise to stop."""
        if len(text) <= 4 * CHUNK_CHARS or not self.cuttable:
            return self.encoder.count(text, add_special_tokens=add_special_tokens)
        total = 0
        for number, piece in enumerate(cut(text)):
            total += self.encoder.count(piece, add_special_tokens=add_special_tokens and number == 0)
            tick(total)
        return total


def cut(text: str, chars: int = CHUNK_CHARS) -> Iterator[str]:
    """Pieces of about ``chars`` characters, cut only before a letter that begins a line after a non-space.

    A line break between a visible character and an ASCII letter ends a pre-token in every byte-level
    pre-tokenizer in use (GPT-2, cl100k, o200k, Llama 3, Qwen, DeepSeek, GLM): line breaks join to what is before
    them, letters never to a line break.
    """
    start = 0
    while len(text) - start > 2 * chars:
        place = _line_start(text, start + chars, min(len(text), start + 2 * chars))
        if place is None:
            # One run without such a line: take the rest up to the next one, however long.
            place = _line_start(text, start + 2 * chars, len(text))
            if place is None:
                break
        yield text[start:place]
        start = place
    yield text[start:]


def _line_start(text: str, begin: int, end: int) -> int | None:
    place = text.find("\n", begin, end)
    while 0 <= place < end - 1:
        after = text[place + 1]
        if after.isascii() and after.isalpha() and text[place - 1].isascii() and text[place - 1].isalnum():
            return place + 1
        place = text.find("\n", place + 1, end)
    return None


def load_vocabulary(path: Path) -> Vocabulary:
    """A tokenizer.json, a tekken.json or a tiktoken file.

    Raises:
        ConfigError: the file is missing or not a tokenizer.
    """
    try:
        if path.suffix != ".json":
            return _from_tiktoken(path, None, None)
        text = path.read_text("utf-8")
        data = json.loads(text)
        if "config" in data and "vocab" in data and "model" not in data:
            return _from_tekken(data)
        return _from_huggingface(text, data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"{path}: not a tokenizer that can be loaded ({error}); give a tokenizer.json"]) from error


def _from_huggingface(text: str, data: dict[str, Any]) -> Vocabulary:
    reference = _hf(text)
    encoder, note = _checked(text, reference)
    model = data["model"]
    vocab = model.get("vocab") or {}
    pieces = vocab if isinstance(vocab, dict) else [piece for piece, _ in vocab]
    byte_level = model.get("type") == "BPE" and "ByteLevel" in json.dumps(data.get("pre_tokenizer"))
    specials = frozenset(token["content"] for token in data.get("added_tokens") or [])
    return Vocabulary(
        encoder=encoder,
        # A byte-level token's characters stand for one byte each; elsewhere a character is up to 4 bytes.
        max_token_bytes=max((len(p) if byte_level else len(p.encode("utf-8", "replace")) for p in pieces), default=1),
        byte_level=byte_level,
        cuttable=byte_level and _cuts_add_up(encoder),
        specials=specials,
        prompt_specials=reference.num_special_tokens_to_add(False),
        pair_specials=reference.num_special_tokens_to_add(True),
        note=note,
    )


def _hf(text: str) -> tokenizers.Tokenizer:
    try:
        reference = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise ValueError(str(error)) from error
    reference.no_truncation()
    reference.no_padding()
    return reference


def _checked(text: str, reference: tokenizers.Tokenizer) -> tuple[Encoder, str | None]:
    """fastokens if it counts every sample as HF does, with and without special tokens; else HF and the reason."""
    slow = HfEncoder(reference)
    try:
        native = fastokens.Tokenizer.from_json_str(text)
        native.no_truncation()
        native.no_padding()
    except (ValueError, RuntimeError, TypeError) as error:
        return slow, f"fastokens cannot load it: {error}"
    fast = FastEncoder(native)
    added = json.loads(text).get("added_tokens") or []
    samples = [*SAMPLES, *(f"a{token['content']} b\n{token['content']}" for token in added[:64])]
    for number, sample in enumerate(samples):
        for specials in (False, True):
            if fast.count(sample, add_special_tokens=specials) != slow.count(sample, add_special_tokens=specials):
                return slow, f"fastokens counts sample {number} differently"
    native.enable_segment_cache(SEGMENT_CACHE_BYTES)
    return fast, None


def _cuts_add_up(encoder: Encoder) -> bool:
    text = "\n".join(SAMPLES)
    whole = encoder.count(text, add_special_tokens=False)
    return whole == sum(encoder.count(piece, add_special_tokens=False) for piece in cut(text, 64))


def _from_tiktoken(
    path: Path, pattern: str | None, specials: dict[str, int] | None, prompt_specials: int = 0
) -> Vocabulary:
    encoding = next((name for name in ("o200k_base", "cl100k_base") if name in path.name), None)
    if pattern is None and encoding is None:
        raise ValueError("a tiktoken file must be named after its encoding (o200k_base, cl100k_base)")
    ranks = [base64.b64decode(line.split()[0]) for line in path.read_bytes().splitlines() if line]
    native = fastokens.Tokenizer.from_tiktoken(str(path), pattern=pattern, special_tokens=specials, encoding=encoding)
    encoder = FastEncoder(native)
    native.enable_segment_cache(SEGMENT_CACHE_BYTES)
    return Vocabulary(
        encoder=encoder,
        max_token_bytes=max(map(len, ranks)),
        byte_level=True,
        cuttable=_cuts_add_up(encoder),
        specials=frozenset(specials or ()),
        prompt_specials=prompt_specials,
        pair_specials=2 * prompt_specials,
    )


def _from_tekken(data: dict[str, Any]) -> Vocabulary:
    """Mistral's tekken file: ranks by byte string, special tokens counted before them, one BOS before every prompt."""
    config = data["config"]
    regular = config["default_vocab_size"] - config["default_num_special_tokens"]
    named = {
        token["token_str"]: regular + token["rank"]
        for token in data.get("special_tokens") or []
        if token.get("token_str")
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tekken.tiktoken"
        lines = (f"{token['token_bytes']} {token['rank']}" for token in data["vocab"][:regular])
        path.write_text("\n".join(lines) + "\n", "ascii")
        return _from_tiktoken(path, config["pattern"], named, prompt_specials=1)
