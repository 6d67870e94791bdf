"""What a request goes through on its way into one cluster, once per attempt: credentials, path, model name, headers.

Attempts share one header map: what one attempt removes or sets, the next one finds (observed on Envoy 1.40: a
retry met the first attempt's content-length and an injected key). So ``stash`` keeps the originals in filter
state before the router, and every cluster writes all that any cluster may have changed. Filter state never
reaches the access log, so a client's credential stays inside Envoy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources

from extproc.config import Config, Target
from extproc.gateway import names
from extproc.gateway.pieces import APPEND_ACTION, Origin, header, http_filter, remove, remove_prefix, typed
from extproc.gateway.protos import (
    core,
    credential_injector,
    filter_state,
    generic_credential,
    hcm,
    header_mutation,
    lua,
    mutation_rules,
    set_filter_state,
    tls,
    upstream_codec,
)

#: Request headers in which clients send API keys (OpenAI, Anthropic, Azure, Google).
CREDENTIALS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
#: Credentials for the gateway itself or for a browser's session; no engine gets them, whatever ``auth`` says.
NEVER_FORWARDED = ("cookie", "proxy-authorization")
#: Where the network path of a client shows; other people's APIs need not know it.
PRIVATE_PREFIXES = ("x-forwarded-", "x-envoy-")

#: Filter state: request header -> object key. Kept after kvgate's answer, before the router.
STASHED = {
    **{name: f"kvgate.client.{name}" for name in CREDENTIALS},
    names.HEADER_MODEL_AT: names.STATE_MODEL_AT,
    names.HEADER_ADAPTER: names.STATE_ADAPTER,
    "content-length": "kvgate.content-length",
    ":path": "kvgate.path",
}


def secret_name(variable: str) -> str:
    """The name of the secret that Envoy reads from an environment variable."""
    return f"env:{variable}"


def stash() -> Iterator[hcm.HttpFilter]:
    """Downstream filters behind ext_proc: keep the originals, then take what no engine may see off the request."""
    kept = [
        filter_state.FilterStateValue(
            object_key=key, factory_key="envoy.string", format_string=_format(f"%REQ({name})%"), skip_if_empty=True
        )
        for name, key in STASHED.items()
    ]
    yield http_filter("set_filter_state", set_filter_state.Config(on_request_headers=kept))
    # The rid stays: the per-attempt log can read nothing but request headers.
    yield _mutate(remove((names.HEADER_MODEL_AT, names.HEADER_ADAPTER, *CREDENTIALS, *NEVER_FORWARDED)))


def attempt_filters(config: Config, target: Target, *, prefix: str) -> list[hcm.HttpFilter]:
    """The upstream filter chain of a cluster of ``target`` whose base URL has the path ``prefix``."""
    return list(_attempt_filters(config, target, prefix))


def _attempt_filters(config: Config, target: Target, prefix: str) -> Iterator[hcm.HttpFilter]:
    yield _mutate(
        [
            *remove(_credential_headers(config)),
            *(_from_state(name) for name in CREDENTIALS if target.auth.client == "forward"),
            _from_state("content-length", APPEND_ACTION.OVERWRITE_IF_EXISTS),
            *(remove_prefix(private) for private in PRIVATE_PREFIXES if target.remote),
        ]
    )
    if any(_prefixes(config)):
        yield _lua("path_prefix.lua", f"local PREFIX = {lua_string(prefix)}\n")
    if target.auth.inject is not None:
        credential = generic_credential.Generic(
            credential=tls.SdsSecretConfig(name=secret_name(target.auth.inject.secret_env)),
            header=target.auth.inject.header,
            header_value_prefix=target.auth.inject.prefix,
        )
        named = core.TypedExtensionConfig(
            name="envoy.http.injected_credentials.generic", typed_config=typed(credential)
        )
        yield http_filter(
            "credential_injector", credential_injector.CredentialInjector(overwrite=True, credential=named)
        )
    if target.served_model is not None:
        yield _lua("model_rewrite.lua", _rewrite_values(target.served_model, target.adapters))
    yield http_filter("upstream_codec", upstream_codec.UpstreamCodec())


def _credential_headers(config: Config) -> list[str]:
    """Every header in which an earlier attempt may have left a credential."""
    injected = [t.auth.inject.header.lower() for t in config.targets.values() if t.auth.inject]
    return list(dict.fromkeys((*CREDENTIALS, *injected)))


def _prefixes(config: Config) -> Iterator[str]:
    for target in config.targets.values():
        for url in ([target.url] if target.url else []) + [replica.url for replica in target.replicas]:
            yield Origin.parse(url).prefix


def _rewrite_values(served: str, adapters: tuple[str, ...]) -> str:
    listed = "".join(f"[{lua_string(name)}] = true, " for name in adapters)
    return f"local SERVED = {lua_string(json.dumps(served))}\nlocal ADAPTERS = {{ {listed}}}\n"


def _lua(script: str, values: str) -> hcm.HttpFilter:
    """One of the scripts beside this module, with its values defined before it."""
    source = values + resources.files("extproc.gateway").joinpath(script).read_text(encoding="utf-8")
    made = lua.Lua(default_source_code=core.DataSource(inline_string=source))
    return hcm.HttpFilter(name=f"kvgate.{script.removesuffix('.lua')}", typed_config=typed(made))


def lua_string(text: str) -> str:
    """``text`` as a Lua string literal; every byte that is not a plain name character is escaped."""
    plain = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:@+- /"
    return '"' + "".join(chr(byte) if byte in plain else f"\\{byte:03d}" for byte in text.encode()) + '"'


def _mutate(mutations: list[mutation_rules.HeaderMutation]) -> hcm.HttpFilter:
    made = header_mutation.HeaderMutation(mutations=header_mutation.Mutations(request_mutations=mutations))
    return http_filter("header_mutation", made)


def _from_state(
    name: str, action: APPEND_ACTION = APPEND_ACTION.OVERWRITE_IF_EXISTS_OR_ADD
) -> mutation_rules.HeaderMutation:
    """Set a header to what was stashed; a header that was not there stays absent."""
    return mutation_rules.HeaderMutation(append=header(name, f"%FILTER_STATE({STASHED[name]}:PLAIN)%", action))


def _format(text: str) -> core.SubstitutionFormatString:
    return core.SubstitutionFormatString(text_format_source=core.DataSource(inline_string=text), omit_empty_values=True)
