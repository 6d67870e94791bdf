"""The exception tree: what can be wrong with input and with what we depend on.

Owns the two kinds of failure that travel as exceptions: the client's fault (``BadRequest``, with the
status, code and parameter to answer) and a broken dependency (``DependencyDown``). A refusal for want of
room is neither; it is a value (``types.Refusal``).
"""

from __future__ import annotations


class KvgateError(Exception):
    """Root of everything kvgate raises on purpose."""


class BadRequest(KvgateError):
    """The client's input cannot be used; answered in the client's dialect.

    ``status`` is 400, 404, 413 or 415; ``code`` a stable machine string; ``param`` the JSON path of the
    field at fault, or None; ``message`` one sentence without any of the prompt's text.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param


class ConfigError(KvgateError):
    """A configuration that cannot be used; ``problems`` holds one printable line per mistake."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class UsageError(KvgateError):
    """A command line that cannot be meant so; one printable line, exit status 2."""


class GeometryError(KvgateError):
    """A model's configuration that is not understood; the message names the file and the field."""


class DependencyDown(KvgateError):
    """Something we call did not answer in time or answered nonsense (Redis, an engine, NVML)."""


class LedgerDown(DependencyDown):
    """The ledger did not answer within its deadline; the outcome of the call is unknown."""
