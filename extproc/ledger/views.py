"""One replica as a snapshot shows it, from its last scrape and its sums: the same for every implementation.

Pure; knows no storage. The state is judged with the default freshness, and without what only a candidate knows
(static capacity, watermark).
"""

from __future__ import annotations

from extproc.ledger.base import ReplicaView
from extproc.ledger.rules import Epoch, Scrape, Sums, health

#: Ages at which a view calls a report stale and unknown; a reservation names its own.
FRESH_US, UNKNOWN_US = 5_000_000, 15_000_000


def view(name: str, scrape: Scrape | None, sums: Sums, epoch: Epoch | None, now_us: int) -> ReplicaView:
    """Assemble the view of one replica."""
    live = scrape if scrape is not None and scrape.expires_us > now_us else None
    h = health(scrape, sums, -1, epoch or Epoch("", 0), FRESH_US, UNKNOWN_US, now_us)
    foreign = None if live is None or live.foreign < 0 else live.foreign
    committed = None if live is not None and foreign is None else sums.kv + (foreign or 0)
    capacity = live.capacity if live is not None else -1
    return ReplicaView(
        report=live.report if live is not None else None,
        replica=name,
        target=live.report.target if live is not None else "",
        state=h.state,
        age_s=None if scrape is None else (now_us - scrape.start_us) / 1e6,
        reserved_blocks=sums.kv,
        foreign_blocks=foreign,
        committed_blocks=committed,
        headroom_blocks=None if committed is None or capacity < 0 else capacity - committed,
        sequences=sums.sequences,
        prefill_level_tokens=sums.level_now(sums.rate, now_us),
        reservations=sums.reservations,
        orphaned=sums.orphans,
        over_admissions=sums.over_adopted + sums.over_grew + sums.over_foreign,
        drained_by_operator=sums.drained,
        bypass=live is not None and live.bypass(now_us),
        over_adopted=sums.over_adopted,
        over_grew=sums.over_grew,
        over_foreign=sums.over_foreign,
        lane_blocks=dict(sums.lanes),
    )
