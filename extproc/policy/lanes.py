"""Which lane a request belongs to and which targets it may use, in order.

Pure and deterministic: a configuration is compiled once into a ``LaneTable``; ``classify`` answers per request.
Order of belief: alias of ``model``, a lane header from a trusted network, the default lane, else unknown model.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from extproc.config.models import Config, Lane, Target
from extproc.types import RequestHead


@dataclass(frozen=True, slots=True)
class Route:
    """A lane and the ordered targets of one request; ``fallback`` is the lane's own, already part of the chain.

    It is None where the lane has none or where the chain begins with it, so that nothing else stands before it.
    ``adapter`` is the request's model name where a target of the chain serves it as a LoRA adapter.
    """

    lane_name: str
    lane: Lane
    chain: tuple[str, ...]
    fallback: str | None
    adapter: str | None


class LaneTable:
    """The configuration's aliases, lanes and trusted networks, compiled for one look-up per request."""

    __slots__ = ("_by_model", "_config", "_default_chains", "_networks")

    def __init__(self, config: Config) -> None:
        self._config = config
        self._networks = tuple(
            ipaddress.ip_network(cidr) for cidr in (config.lane_header.trusted_cidrs if config.lane_header else ())
        )
        self._by_model = {name: self._route(alias.lane, alias.targets, name) for name, alias in config.aliases.items()}
        self._default_chains: dict[tuple[str, str], Route] = {}

    def classify(self, head: RequestHead, model: str) -> Route | None:
        """The route of a request for ``model``; None where no alias, header or default lane takes it."""
        route = self._by_model.get(model)
        if route is not None:
            return route
        lane = self._lane_from_header(head) or self._config.default_lane
        if lane is None:
            return None
        return self._route(lane, self._targets_for(lane, model), model)

    def any_target(self) -> tuple[str, ...]:
        """Every target, local ones first: where a request goes that names no model."""
        names = self._config.targets
        return tuple(sorted(names, key=lambda name: names[name].remote))

    def _lane_from_header(self, head: RequestHead) -> str | None:
        rule = self._config.lane_header
        if rule is None:
            return None
        lane = head.headers.get(rule.name.lower())
        if lane is None or lane not in self._config.lanes or not self._trusted(head.peer_address):
            return None
        return lane

    def _trusted(self, address: str) -> bool:
        try:
            peer = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(peer in network for network in self._networks)

    def _targets_for(self, lane: str, model: str) -> tuple[str, ...]:
        named = tuple(name for name, target in self._config.targets.items() if _answers_to(name, target, model))
        settings = self._config.lanes[lane]
        # Nobody listed these, so the fallback keeps its place after all others.
        return named or settings.targets or tuple(name for name in self.any_target() if name != settings.fallback)

    def _route(self, lane_name: str, targets: tuple[str, ...], model: str) -> Route:
        lane, known = self._config.lanes[lane_name], self._config.targets
        fallback = lane.fallback if lane.fallback in known else None
        chain = [name for name in dict.fromkeys((*targets, *((fallback,) if fallback else ()))) if name in known]
        if lane.remote == "never":
            chain = [name for name in chain if not known[name].remote]
        adapter = model if any(model in known[name].adapters for name in chain) else None
        # One that stands first is the request's own target, and the lane's input budget holds for it as for any.
        return Route(lane_name, lane, tuple(chain), fallback if fallback in chain[1:] else None, adapter)


def _answers_to(name: str, target: Target, model: str) -> bool:
    return model in (name, target.served_model, target.model) or model in target.adapters
