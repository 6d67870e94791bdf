"""The demo's figures: the two runs side by side, the offline packer, and what must hold.

Pure: outcomes in, numbers and lines out.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from extproc.local.demo_load import Job, Outcome

#: Ours on the primary, as a share of what the packer puts there, must be at least this.
LEAST_PACKED = 0.90
#: At most this share of all requests may be refused while a target that could take them is idle.
MOST_IDLE_REFUSALS = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of one run."""

    sent: int
    fates: Mapping[str, int]
    reasons: Mapping[str, int]
    targets: Mapping[str, int]
    latency_s: tuple[float, float] | None
    first_byte_s: tuple[float, float] | None
    took_s: float


@dataclass(frozen=True, slots=True)
class Packing:
    """Requests on the primary: ours, and those of an offline first-fit packer over the same arrivals."""

    ours: int
    packer: int

    @property
    def share(self) -> float:
        """Ours as a share of the packer's."""
        return self.ours / self.packer if self.packer else 1.0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold, and whether it does."""

    name: str
    holds: bool
    figure: str


def run_figures(outcomes: Sequence[Outcome], *, default_target: str | None = None) -> Run:
    """Figures of one run; ``default_target`` names who served where no header says it."""
    served = [outcome for outcome in outcomes if outcome.fate == "served"]
    return Run(
        sent=len(outcomes),
        fates=dict(Counter(outcome.fate for outcome in outcomes)),
        reasons=dict(Counter(outcome.reason or "?" for outcome in outcomes if outcome.fate == "refused")),
        targets=dict(Counter(outcome.target or default_target or "?" for outcome in served)),
        latency_s=_percentiles([outcome.reply.took_s for outcome in served]),
        first_byte_s=_percentiles(
            [outcome.reply.first_byte_s for outcome in served if outcome.reply.first_byte_s is not None]
        ),
        took_s=max((outcome.ended_s for outcome in outcomes), default=0.0),
    )


def _percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    """Median and 95th percentile (nearest rank)."""
    if not values:
        return None
    ordered = sorted(values)
    return statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1]


def packing(outcomes: Sequence[Outcome], *, primary: str, cells: int, slots: int) -> Packing:
    """How many requests we put on the primary, and how many an offline first-fit packer would have.

    The packer sees each arrival in order, knows exactly when what it placed ends, and places a request on the primary
    whenever its reserved cells and a slot are free, with no watermark, no lanes and no prefill budget. A request that
    ran elsewhere in truth is taken to last as long as the primary needed per output token, at the median.
    """
    on_primary = [outcome for outcome in outcomes if outcome.fate == "served" and outcome.target == primary]
    per_token_s = statistics.median(o.reply.took_s / max(1, o.output_tokens) for o in on_primary) if on_primary else 0.0
    ours = {outcome.job.number for outcome in on_primary}
    ends: list[tuple[float, int]] = []
    used = placed = 0
    for outcome in sorted(outcomes, key=lambda one: one.sent_s):
        while ends and ends[0][0] <= outcome.sent_s:
            used -= heapq.heappop(ends)[1]
        size = outcome.job.reserved_tokens
        if used + size <= cells and len(ends) < slots:
            lasts_s = outcome.reply.took_s if outcome.job.number in ours else per_token_s * outcome.job.max_tokens
            heapq.heappush(ends, (outcome.sent_s + lasts_s, size))
            used += size
            placed += 1
    return Packing(len(ours), placed)


def idle_refusals(outcomes: Sequence[Outcome], chains: Mapping[str, Sequence[str]]) -> int:
    """Refusals at a moment when a target of the request's chain served none of ours; ``chains``: alias -> targets."""
    busy = [(o.target, o.sent_s, o.ended_s) for o in outcomes if o.fate == "served" and o.target]

    def idle(target: str, at_s: float) -> bool:
        return not any(name == target and start <= at_s <= end for name, start, end in busy)

    refused = [outcome for outcome in outcomes if outcome.fate == "refused"]
    return sum(any(idle(target, o.sent_s) for target in chains[o.job.alias]) for o in refused)


def checks(
    without: Run, with_: Run, packed: Packing, idle: int, ledger: Mapping[str, object], audit_ok: bool, overflows: int
) -> list[Check]:
    """What the demo claims, each with its figure; ``overflows`` is what the engines' own logs of the second run say."""
    left = ledger.get("reservations")
    over = ledger.get("over_admissions")
    broken = with_.fates.get("broken", 0)
    return [
        Check(
            "without kvgate a full cache kills requests",
            without.fates.get("lost", 0) > 0,
            f"{without.fates.get('lost', 0)} lost",
        ),
        Check(
            "with kvgate none is lost to a full cache",
            not with_.fates.get("lost", 0),
            f"{with_.fates.get('lost', 0)} lost",
        ),
        Check("llama.cpp's own logs say the same", not overflows, f"{overflows} lines about a full cache"),
        Check("every answer is complete or a clean refusal", not broken, f"{broken} broken"),
        Check(
            f"the primary serves >= {LEAST_PACKED:.0%} of what an offline packer puts there",
            packed.share >= LEAST_PACKED,
            f"{packed.ours} of {packed.packer} = {packed.share:.0%}",
        ),
        Check(
            f"refusals while a fallback is idle <= {MOST_IDLE_REFUSALS:.0%}",
            idle <= MOST_IDLE_REFUSALS * with_.sent,
            f"{idle} of {with_.sent} = {idle / max(1, with_.sent):.1%}",
        ),
        Check("the ledger is exactly empty at the end", left == 0, f"{left} reservations"),
        Check("the ledger admitted nothing that did not fit", over == 0, f"{over} over-admissions"),
        Check("the ledger's sums equal its parts", audit_ok, "kvgate ledger audit"),
    ]


def table(without: Run, with_: Run) -> list[str]:
    """The two runs side by side."""

    def seconds(pair: tuple[float, float] | None) -> str:
        return f"{pair[0]:.2f} s / {pair[1]:.2f} s" if pair else "-"

    def refused(run: Run) -> str:
        why = ", ".join(f"{reason} {count}" for reason, count in sorted(run.reasons.items()))
        return f"{run.fates.get('refused', 0)}" + (f" ({why})" if why else "")

    names = sorted(
        set(without.targets) | set(with_.targets), key=lambda name: ("primary small remote".find(name), name)
    )
    rows = [
        ("coding requests sent", str(without.sent), str(with_.sent)),
        ("served", *(str(run.fates.get("served", 0)) for run in (without, with_))),
        ("lost to a full cache", *(str(run.fates.get("lost", 0)) for run in (without, with_))),
        ("refused with a reason", refused(without), refused(with_)),
        ("broken otherwise", *(str(run.fates.get("broken", 0)) for run in (without, with_))),
        *((f"served by {name}", *(str(run.targets.get(name, 0)) for run in (without, with_))) for name in names),
        ("latency p50 / p95 of served", seconds(without.latency_s), seconds(with_.latency_s)),
        ("first byte p50 / p95 of served", seconds(without.first_byte_s), seconds(with_.first_byte_s)),
        ("run took", f"{without.took_s:.1f} s", f"{with_.took_s:.1f} s"),
    ]
    header = ("", "without kvgate", "with kvgate")
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(3)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def offered_tokens(work: Sequence[Job]) -> int:
    """KV cells that all jobs together would reserve."""
    return sum(job.reserved_tokens for job in work)


def broken_line(outcome: Outcome) -> str:
    """What is known of a broken answer, without any of its text."""
    reply = outcome.reply
    kind = reply.headers.get("content-type", "no content type")
    what = reply.error or f"status {reply.status}, {kind}, {len(reply.body)} bytes, {len(reply.events)} events"
    return f"demo-{outcome.job.number} at {outcome.sent_s:.1f} s for {reply.took_s:.1f} s: target {outcome.target}, reason {outcome.reason}: {what}"
