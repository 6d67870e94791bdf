"""Where the ledger's server is: ledger URLs, and the master behind Sentinels.

Owns URL parsing and TLS contexts. ``redis://[user:password@]host[:port][/db]``, ``unix:///path?db=0``;
``redis+sentinel://[user:password@]host:port,host:port/SERVICE[/db]``; ``redis+cluster://host:port,host:port``. With
``rediss`` for ``redis`` the connection is TLS; ``?ca=FILE&cert=FILE&key=FILE`` name the files, and
``?sentinelUser=..&sentinelPassword=..`` log in at the Sentinels themselves.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

#: Parameters after ``?`` by scheme and kind.
PARAMETERS = {"unix": ("db",), "rediss": ("ca", "cert", "key"), "sentinel": ("sentinelUser", "sentinelPassword")}
DEFAULT_PORT, DEFAULT_SENTINEL_PORT = 6379, 26379


@dataclass(frozen=True, slots=True)
class Login:
    """Credentials for AUTH; both None: none is sent."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)

    def command(self) -> list[str] | None:
        """The AUTH command, or None."""
        if self.password is None:
            return None
        return ["AUTH", self.user, self.password] if self.user else ["AUTH", self.password]


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed ledger URL; ``kind`` is single, sentinel or cluster, ``path`` a Unix socket."""

    kind: str
    hosts: tuple[tuple[str, int], ...]
    login: Login
    db: int = 0
    path: str | None = None
    service: str = ""
    sentinel_login: Login = Login()
    tls: ssl.SSLContext | None = None

    @property
    def printable(self) -> str:
        """The address without credentials, for logs."""
        if self.path is not None:
            return self.path
        return f"{self.kind} {','.join(f'{h}:{p}' for h, p in self.hosts)}"


def parse(url: str) -> Address:
    """Parse a ledger URL; ValueError names what is wrong with it, never its password."""
    try:
        parts = urlsplit(url)
    except ValueError:  # its text may quote the password
        raise ValueError("a ledger URL that cannot be taken apart into host and port") from None
    scheme, _, kind = parts.scheme.partition("+")
    kind = kind or "single"
    if scheme not in ("redis", "rediss", "unix") or kind not in ("single", "sentinel", "cluster"):
        raise ValueError(
            f"ledger URL scheme {parts.scheme!r}: use redis, rediss, unix, redis+sentinel or redis+cluster"
        )
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    _only_known(parts, scheme, kind)
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    login = Login(unquote(user) or None, unquote(password) if credentials and password else None)
    if scheme == "unix":
        if hosts:
            raise ValueError("a unix ledger URL has three slashes before its path")
        return Address("single", (), login, _number(query.get("db", "0"), "database"), path=unquote(parts.path))
    path = [part for part in parts.path.split("/") if part]
    if kind == "sentinel":
        if not path:
            raise ValueError("a redis+sentinel URL names its service")
        service, path = path[0], path[1:]
    else:
        service = ""
    if len(path) > 1:
        raise ValueError("the ledger URL goes on after its database")
    port = DEFAULT_SENTINEL_PORT if kind == "sentinel" else DEFAULT_PORT
    db = _number(path[0], "database") if path else 0
    pairs = tuple(_host(item, port) for item in hosts.split(",") if item)
    sentinel = Login(query.get("sentinelUser"), query.get("sentinelPassword"))
    context = _tls(query) if scheme == "rediss" else None
    return Address(kind, pairs or (("127.0.0.1", port),), login, db, None, service, sentinel, context)


def _only_known(parts: SplitResult, scheme: str, kind: str) -> None:
    """ValueError for what would be passed over: nothing of it is repeated, for it may be the rest of a password."""
    if parts.fragment:
        raise ValueError("a ledger URL has no fragment (does a password need %-encoding?)")
    known = [name for word in (scheme, kind) for name in PARAMETERS.get(word, ())]
    if parse_qs(parts.query, keep_blank_values=True).keys() - set(known):
        what = f"a parameter other than {', '.join(known)}" if known else "parameters, and such a URL takes none"
        raise ValueError(f"the ledger URL has {what} (does a password need %-encoding?)")


def _host(item: str, port: int) -> tuple[str, int]:
    if item.startswith("["):  # [::1]:6379
        host, _, rest = item[1:].partition("]")
        return host, _number(rest[1:], "port") if rest.startswith(":") else port
    host, colon, number = item.rpartition(":")
    return (host, _number(number, "port")) if colon else (item, port)


def _number(text: str, what: str) -> int:
    # What stands there is not repeated: with a slash in a password it is a part of it.
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"the {what} of the ledger URL is not a number (does a password need %-encoding?)")
    return int(text)


def _tls(query: dict[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=query.get("ca"))
    if "cert" in query:
        context.load_cert_chain(query["cert"], query.get("key"))
    return context
