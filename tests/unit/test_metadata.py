"""What travels in Envoy's metadata comes back as the same reservation, and nothing else comes back as one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.ledger.base import Reservation
from extproc.metadata import reservation_fields, reservation_from
from extproc.types import Need

text = st.text(min_size=1, max_size=20)
count = st.integers(0, 2**53 - 1)
reservations = st.builds(
    Reservation,
    rid=text,
    target=text,
    replica=text,
    lane=text,
    owner=text,
    request_id=text,
    klass=text,
    reserved_at_s=st.floats(1.0, 4e9),
    need=st.builds(
        Need, kv_blocks=count, input_blocks=count, kv_bytes=count, prefill_tokens=count, sequences=count,
        vram_bytes=st.just((5, 6)),
    ),
    input_tokens=count,
    expected_output_tokens=count,
    max_output_tokens=st.none() | count,
    cap_blocks=count,
    cap_s=st.floats(0, 1e6),
    devices=st.just(("GPU-1", "GPU-2")),
    expected_s=st.floats(0, 1e6),
)  # fmt: skip


@given(reservations)
def test_round_trip(reservation: Reservation) -> None:
    """Every field survives as a Struct value (text or double)."""
    fields = reservation_fields(reservation, "p")
    assert all(isinstance(value, str | float) for value in fields.values())
    assert reservation_from(fields, "p") == reservation


@given(reservations)
def test_another_pools_reservation_is_not_ours(reservation: Reservation) -> None:
    """Two pools may share an Envoy; each reads its own."""
    assert reservation_from(reservation_fields(reservation, "p"), "q") is None


@given(
    reservations,
    st.data(),
    st.one_of(st.none(), st.just(float("nan")), st.just(-1.0), st.just(1e300), st.text(max_size=3), st.booleans()),
)
def test_broken_fields_give_nothing_or_a_sound_reservation(
    reservation: Reservation, data: st.DataObject, junk: object
) -> None:
    """A mangled field never raises and never yields a negative or endless count."""
    fields: dict[str, object] = dict(reservation_fields(reservation, "p"))
    fields.pop("vram")
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = junk
    found = reservation_from(fields, "p")
    if found is not None:
        assert 0 <= found.need.kv_blocks < 2**53
        assert found.cap_s < 1e300 or name == "cap_s"
