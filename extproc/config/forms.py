"""The forms of single words in the configuration: names, hosts, addresses, URLs, headers.

Pure. Every form has an example, which is what a mistake's line shows instead of a pattern. The command line uses the
same forms (``problem``), so that none of its values is refused later than the file's.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

#: A unix socket's path is at most this many bytes long (sockaddr_un on Linux, without the closing zero).
MAX_SOCKET_PATH = 107
MAX_PORT = 65535
MAX_FILE_NAME = 255
#: Headers that frame a message or belong to one hop: writing them would break the request, not mark it.
FRAMING_HEADERS = frozenset(
    {
        "connection", "content-encoding", "content-length", "content-type", "expect", "host", "keep-alive",
        "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
#: Headers that start so are the gateway's own and are taken off every request.
OWN_PREFIXES = ("x-kvgate-", "x-envoy-")

_HEADER = re.compile(r"[A-Za-z0-9-]+")
#: Labels of 1 to 63 characters, as a resolver takes them; engines in containers have underscores in their names.
_HOST = re.compile(r"(?=.{1,253}\Z)(?:[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(?:\.(?!\Z)|\Z))+")
_PATH = re.compile(r"(?:/[^\s?#]*)?")
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]{1,5}))?")

ADDRESS_EXAMPLE = "127.0.0.1:9000, [::1]:9000 or unix:/run/kvgate/extproc.sock"
TCP_EXAMPLE = "127.0.0.1:9902 or [::1]:9902"
URL_EXAMPLE = "http://10.0.0.5:8000 or https://api.example.com/v1"
HEADER_EXAMPLE = "x-team-lane"


def wrong(example: str, why: str = "has a form that cannot be used here") -> PydanticCustomError:
    """The mistake of a value that does not have its form; ``example`` is how to write it."""
    return PydanticCustomError("form", "{why}; write it like {example}", {"why": why, "example": example})


def matching(pattern: str, example: str) -> AfterValidator:
    """A validator of text that matches ``pattern`` from end to end."""
    compiled = re.compile(pattern)

    def validate(text: str) -> str:
        if compiled.fullmatch(text) is None:
            raise wrong(example)
        return text

    return AfterValidator(validate)


def printable(text: str) -> str:
    """Text that a log line, a JSON value and a header can hold as it is: no control characters, no outer blanks."""
    if not text or text != text.strip() or not text.isprintable():
        raise wrong("qwen-coder", "is empty or holds blanks at an end or characters that cannot be printed")
    return text


def file_path(text: str) -> str:
    """A path that a file system takes: printable, no part of it longer than 255 bytes."""
    if any(len(part.encode()) > MAX_FILE_NAME for part in printable(text).split("/")):
        raise wrong("/models/coder/tokenizer.json", f"has a part longer than {MAX_FILE_NAME} bytes")
    return text


def host(text: str) -> bool:
    """Whether ``text`` is a host name, an IPv4 address or an IPv6 address in brackets."""
    if text.startswith("["):
        return _is_ip(text[1:-1], ipaddress.IPv6Address)
    if re.fullmatch(r"[0-9.]+", text):
        return _is_ip(text, ipaddress.IPv4Address)
    return _HOST.fullmatch(text) is not None


def _is_ip(text: str, kind: Callable[[str], object]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return "%" not in text  # a zone would name an interface of whoever reads the file


def split(text: str) -> tuple[str, int | None] | None:
    """Host (IPv6 in brackets) and port of an authority, the port None where there is none; None where it is neither."""
    found = _AUTHORITY.fullmatch(text)
    if found is None or not host(found[1]) or (found[2] is not None and int(found[2]) > MAX_PORT):
        return None
    return found[1], None if found[2] is None else int(found[2])


def tcp_address(text: str) -> str:
    """host:port, the port 0 to 65535."""
    parts = split(text)
    if parts is None or parts[1] is None:
        raise wrong(TCP_EXAMPLE)
    return text


def address(text: str) -> str:
    """``unix:PATH`` or host:port."""
    if not text.startswith("unix:"):
        try:
            return tcp_address(text)
        except PydanticCustomError:
            raise wrong(ADDRESS_EXAMPLE) from None
    path = text.removeprefix("unix:")
    if not path.startswith("/") or not path.isprintable() or " " in path:
        raise wrong(ADDRESS_EXAMPLE)
    if len(path.encode()) > MAX_SOCKET_PATH:
        raise wrong("unix:/run/kvgate/extproc.sock", f"is longer than the {MAX_SOCKET_PATH} bytes of a socket's path")
    return text


def http_url(text: str) -> str:
    """http:// or https://, a host, perhaps a port from 1 and a path; no user, query or fragment."""
    scheme, slashes, rest = text.partition("://")
    authority, _, path = rest.partition("/")
    parts = split(authority)
    if scheme not in ("http", "https") or not slashes or parts is None or parts[1] == 0:
        raise wrong(URL_EXAMPLE)
    if _PATH.fullmatch("/" + path) is None or not path.isprintable():
        raise wrong(URL_EXAMPLE)
    return text


def bare_host(text: str) -> bool:
    """The same with an IPv6 address without brackets."""
    return _is_ip(text, ipaddress.IPv6Address) or (host(text) and not text.startswith("["))


def literal(text: str) -> bool:
    """Whether ``text`` is an address, IPv6 without brackets, and not a name."""
    return _is_ip(text, ipaddress.IPv4Address) or _is_ip(text, ipaddress.IPv6Address)


def server_name(text: str) -> str:
    """The host that a certificate names, IPv6 without brackets."""
    if not bare_host(text):
        raise wrong("api.example.com")
    return text


def header(text: str) -> str:
    """The name of a header that a request may carry beside those that frame it and those of the gateway."""
    if _HEADER.fullmatch(text) is None:
        raise wrong(HEADER_EXAMPLE)
    name = text.lower()
    if name in FRAMING_HEADERS:
        raise wrong(HEADER_EXAMPLE, "names a header that frames the request or belongs to one connection")
    if name.startswith(OWN_PREFIXES):
        raise wrong(HEADER_EXAMPLE, "names a header of the gateway, which is taken off every request")
    return text


def network(text: str) -> str:
    """A network in CIDR notation whose host bits are zero."""
    try:
        ipaddress.ip_network(text)
    except ValueError:
        raise wrong("10.0.0.0/8", f"{text!r} is not a network") from None
    return text


Name = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}", "qwen-coder-14b (letters, digits and ._:@+-)")]
Printable = Annotated[str, Field(max_length=256), AfterValidator(printable)]
FilePath = Annotated[str, Field(max_length=4096), AfterValidator(file_path)]
TcpAddress = Annotated[str, AfterValidator(tcp_address)]
Address = Annotated[str, AfterValidator(address)]
HttpUrl = Annotated[str, AfterValidator(http_url)]
ServerName = Annotated[str, AfterValidator(server_name)]
Header = Annotated[str, AfterValidator(header)]
Network = Annotated[str, AfterValidator(network)]
Variable = Annotated[str, matching(r"[A-Za-z_][A-Za-z0-9_]*", "REMOTE_API_KEY")]
#: Goes into a header before a credential.
Prefix = Annotated[str, Field(max_length=256), matching(r"[\x20-\x7e]*", '"Bearer " (printable ASCII)')]
LedgerUrl = Annotated[
    str,
    matching(
        r"embedded|memory|(redis|rediss|unix|redis\+sentinel|rediss\+sentinel|redis\+cluster|rediss\+cluster)://[^\s\x00-\x1f]+",
        "redis://127.0.0.1:6379/0, redis+sentinel://host:26379/SERVICE or unix:///run/valkey.sock",
    ),
]


def problem(kind: Any, text: str) -> str | None:
    """What is wrong with ``text`` as a value of one of these types, with its mend; None where nothing is."""
    try:
        TypeAdapter(kind).validate_python(text)
    except ValidationError as error:
        return str(error.errors(include_url=False, include_input=False)[0]["msg"])
    return None
