"""Files that a configuration names, found from the directory of the file that names them.

Looks whether files exist and reads none. ``~`` is the home directory. A geometry may also be a name of the catalogue,
so it is a path only where it is written like one or where something of that name lies beside the configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from pydantic import BaseModel

from extproc.config.models import Config

#: Keys of a ledger URL's query that name files.
LEDGER_FILES = frozenset({"ca", "cert", "key"})
_GEOMETRY_FILES = (".json", ".gguf")

Section = TypeVar("Section", bound=BaseModel)


def resolved(config: Config, base: Path) -> Config:
    """``config`` with every relative path made absolute from ``base``; keys that were not given stay not given."""
    models = {
        name: _set(
            model,
            tokenizer=_file(model.tokenizer, base),
            chat_template=_file(model.chat_template, base),
            geometry=_geometry(model.geometry, base),
        )
        for name, model in config.models.items()
    }
    targets = {
        name: _set(target, tls=_set(target.tls, ca_file=_file(target.tls.ca_file, base)))
        for name, target in config.targets.items()
    }
    envoy = config.envoy
    if envoy.tls is not None:
        files = {"cert_file": _file(envoy.tls.cert_file, base), "key_file": _file(envoy.tls.key_file, base)}
        envoy = _set(envoy, tls=_set(envoy.tls, **files))
    ledger = _set(config.ledger, url=_ledger(config.ledger.url, base))
    return _set(config, models=models, targets=targets, envoy=envoy, ledger=ledger)


def _set(section: Section, **values: object) -> Section:
    """A copy with those values that differ, so that what was not given in the file does not look given."""
    changed = {name: value for name, value in values.items() if value != getattr(section, name)}
    return section.model_copy(update=changed) if changed else section


def _file(text: str | None, base: Path) -> str | None:
    if text is None:
        return None
    path = _home(text)
    return str(path if path.is_absolute() else base / path)


def _geometry(text: str | None, base: Path) -> str | None:
    if text is None:
        return None
    like_a_path = text.startswith(("/", "./", "../", "~")) or text.lower().endswith(_GEOMETRY_FILES)
    return _file(text, base) if like_a_path or _exists(base / text) else text


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a directory that may not be searched: whoever reads the file says so
        return True


def _home(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user: the name is shown as it was written when the file is not found
        return Path("/") / text


def _ledger(url: str, base: Path) -> str:
    if not url.startswith("rediss") or "?" not in url:
        return url
    try:
        query = parse_qsl(urlsplit(url).query, keep_blank_values=True)
    except ValueError:
        return url  # what is wrong with it is ``checks``' to say
    files = [(key, _file(value, base) or "" if key in LEDGER_FILES and value else value) for key, value in query]
    return url if files == query else f"{url.partition('?')[0]}?{urlencode(files, quote_via=quote, safe='/')}"
