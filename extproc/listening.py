"""Makes way for an address that is about to be served, or says in one line why it cannot be.

Owns the look at sockets, ports and directories before anything large is loaded; the servers bind for themselves.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from extproc.errors import ConfigError

#: A living server accepts at once.
PROBE_S = 1.0


def make_way(address: str, *, where: str) -> None:
    """Leave ``address`` (``unix:PATH`` or host:port) free to be bound; ``ConfigError`` naming ``where`` if it cannot be.

    Makes a socket's directory and removes the socket that a killed process left. One that somebody still serves is
    refused, for it would be stolen silently, and so is a file that is no socket.
    """
    try:
        if address.startswith("unix:"):
            _free_path(Path(address.removeprefix("unix:")), where)
        else:
            _free_port(address)
    except OSError as error:
        raise cannot_bind(where, address, error) from error


def cannot_bind(where: str, address: str, error: Exception) -> ConfigError:
    """The mistake of an address that the system does not give."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return ConfigError([f"{where}: {address} cannot be bound ({' '.join(reason.split())}); name another or free it"])


def _free_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
    )
    for family, kind, protocol, _, place in found:
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(place)
            trial.listen(1)  # a port in TIME_WAIT passes, one that somebody listens on does not


def _free_path(path: Path, where: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        line = (
            f"{where}: the directory {path.parent} cannot be made ({error.strerror}); make it for this user, "
            "or name a socket elsewhere, as with --listen unix:/tmp/kvgate.sock"
        )
        raise ConfigError([line]) from error
    if not _is_free(path):
        raise ConfigError([f"{where}: another process serves {path}; stop it or name another path"])
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as trial:
        trial.bind(os.fspath(path))
    path.unlink()


def _is_free(path: Path) -> bool:
    """Whether nobody serves the path; OSError where something is there that is no socket, or cannot be looked at."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(0, "a file that is no socket is there")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(PROBE_S)
            probe.connect(os.fspath(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return True
    except TimeoutError:
        return False
    return False
