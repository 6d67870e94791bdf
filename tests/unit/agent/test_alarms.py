"""Sharing alarms: who is on a device beside generation."""

from __future__ import annotations

from extproc.agent import alarms
from extproc.agent.devices.base import DeviceReading, DeviceState, ProcessUse

GIB = 1024**3


def device(
    used_gib: float, *processes: ProcessUse, state: DeviceState = DeviceState.OK, ecc: int | None = None
) -> DeviceReading:
    """An 80 GiB card with these processes."""
    used = int(used_gib * GIB)
    return DeviceReading(
        "GPU-a", state, "card", 80 * GIB, 80 * GIB - used, used, processes=processes, ecc_uncorrected=ecc
    )


def kinds(*args: object, **kwargs: object) -> list[str]:
    """Kinds of the alarms found."""
    return [alarm.kind for alarm in alarms.find(*args, **kwargs)]  # type: ignore[arg-type]


def test_one_engine_alone_raises_nothing() -> None:
    """An engine whose processes explain the used memory is in order."""
    assert kinds([device(70, ProcessUse(1, 70 * GIB, "VLLM::EngineCor"))], {"GPU-a": ["gpu-a-0"]}) == []


def test_several_replicas_on_one_device() -> None:
    """Embeddings or a reranker beside generation: both are named."""
    [found] = alarms.find([device(0.1)], {"GPU-a": ["embed-0", "chat-0"]})
    assert (found.kind, found.message) == (alarms.SHARED, "several replicas on one device: chat-0, embed-0")


def test_a_foreign_process_is_named() -> None:
    """b16: another program holds most of the card."""
    reading = device(31, ProcessUse(1, 1 * GIB, "llama-server"), ProcessUse(77, 30 * GIB, "blender"))
    [found] = alarms.find([reading], {})
    assert (found.kind, found.message) == (alarms.FOREIGN, "PID 77 (blender) holds 30.0 GiB")


def test_memory_that_nobody_holds_is_orphaned() -> None:
    """An engine crashed in start-up and its memory stayed: the listed PIDs do not explain it (f20)."""
    [found] = alarms.find([device(25, ProcessUse(9, 7 * GIB, "python3"))], {})
    assert (found.kind, found.message) == (alarms.ORPHANED, "18.0 GiB used beyond the listed PIDs 9")


def test_an_empty_list_beside_a_full_card_is_said() -> None:
    """Left over or a PID namespace: both readings are named, none is concluded (f16)."""
    assert kinds([device(70)], {}) == [alarms.ORPHANED]


def test_sizes_that_are_not_told_blame_nobody() -> None:
    """Without sizes there is no attribution and no orphan (f17)."""
    assert kinds([device(60, ProcessUse(1, None), ProcessUse(2, 5 * GIB, "x"))], {}) == [alarms.UNATTRIBUTED]


def test_more_than_declared() -> None:
    """i07: a pod with half a card declared holds the whole of it."""
    reading = device(60, ProcessUse(5, 60 * GIB, "python3"))
    assert kinds([reading], {}, {5: 40 * GIB}) == [alarms.EXCESS]
    assert kinds([reading], {}, {5: 60 * GIB}) == []


def test_a_device_that_is_not_believed_raises_nothing() -> None:
    """Old lists accuse nobody."""
    assert kinds([device(70, state=DeviceState.UNKNOWN)], {"GPU-a": ["a", "b"]}) == []


def test_uncorrected_memory_errors() -> None:
    """A card that loses bits is an alarm."""
    assert kinds([device(0.1, ecc=2)], {}) == [alarms.MEMORY_ERRORS]
