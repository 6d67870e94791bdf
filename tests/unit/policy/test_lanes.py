"""Lanes: alias first, then a trusted header, then the default; never the first pool for an unknown model."""

from __future__ import annotations

import pytest

from extproc.config import load_text
from extproc.policy.lanes import LaneTable
from extproc.types import RequestHead

TEXT = """
targets:
  big: {engine: vllm, servedModel: qwen, adapters: [team-lora], replicas: [{name: big-0, url: "http://127.0.0.1:1"}]}
  small: {engine: llamacpp, replicas: [{name: small-0, url: "http://127.0.0.1:2"}]}
  far: {engine: openai, url: "https://api.example.com"}
lanes:
  fast: {fallback: far}
  private: {remote: never}
  slow: {}
aliases:
  coder: {lane: fast, targets: [big, small]}
  secret: {lane: private, targets: [big, small]}
  team-lora: {lane: fast, targets: [big, small]}
laneHeader: {name: x-team-lane, trustedCidrs: [10.0.0.0/8, "fd00::/8"]}
"""


def head(lane: str | None = None, peer: str = "10.1.2.3") -> RequestHead:
    """A head from ``peer`` with the lane header."""
    return RequestHead("POST", "/", {"x-team-lane": lane} if lane else {}, peer_address=peer)


TABLE = LaneTable(load_text(TEXT, where="t"))
WITH_DEFAULT = LaneTable(load_text(TEXT + "defaultLane: slow\n", where="t"))


def test_alias_gives_lane_and_chain_with_the_lanes_fallback_last() -> None:
    """The chain is the alias' targets, then the lane's fallback."""
    route = TABLE.classify(head(), "coder")
    assert route is not None
    assert (route.lane_name, route.chain, route.fallback) == ("fast", ("big", "small", "far"), "far")


def test_alias_beats_the_header() -> None:
    """A header cannot move a request out of its alias' lane."""
    route = TABLE.classify(head("slow"), "coder")
    assert route is not None
    assert route.lane_name == "fast"


@pytest.mark.parametrize("peer", ["10.0.0.1", "10.255.255.255", "fd00::1"])
def test_header_from_a_trusted_network_names_the_lane(peer: str) -> None:
    """laneHeader is believed from trustedCidrs."""
    route = TABLE.classify(head("slow", peer), "qwen")
    assert route is not None
    assert (route.lane_name, route.chain) == ("slow", ("big",))


@pytest.mark.parametrize("peer", ["192.0.2.1", "", "not an address", "fe80::1"])
def test_header_from_elsewhere_is_ignored(peer: str) -> None:
    """An untrusted or unreadable peer cannot choose a lane."""
    assert TABLE.classify(head("slow", peer), "qwen") is None


def test_unknown_lane_in_the_header_is_ignored() -> None:
    """A lane that does not exist is no lane."""
    assert TABLE.classify(head("vip"), "qwen") is None


def test_unknown_model_without_a_default_lane_is_nobodys() -> None:
    """An unknown model is 404, never the first pool."""
    assert TABLE.classify(head(), "gpt-9") is None


def test_default_lane_takes_unknown_models() -> None:
    """With a default lane an unknown model may use every target, local ones first."""
    route = WITH_DEFAULT.classify(head(), "gpt-9")
    assert route is not None
    assert (route.lane_name, route.chain) == ("slow", ("big", "small", "far"))


def test_default_lane_still_finds_the_target_that_is_named() -> None:
    """A model that a target serves goes there."""
    route = WITH_DEFAULT.classify(head(), "small")
    assert route is not None
    assert route.chain == ("small",)


def test_remote_never_removes_remotes() -> None:
    """A lane that must not leave the house has local targets only."""
    route = TABLE.classify(head(), "secret")
    assert route is not None
    assert route.chain == ("big", "small")


def test_adapter_name_is_kept() -> None:
    """A LoRA name that a target serves travels as the adapter."""
    route = TABLE.classify(head(), "team-lora")
    assert route is not None
    assert route.adapter == "team-lora"
