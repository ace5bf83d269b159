"""What is promised of the large model's speed, held to the rows that were measured. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.plan import LARGE, Plan
from benchmarks.gpu.results import Scribe
from benchmarks.gpu.stages import OURS, TRANSFORMERS

DECODE, PREFILL = "decode", "prefill"
DECODE_SHARE = 0.6
"""Of the roofline that decoding one sequence of the large model is to reach."""
PREFILL_SHARE = 0.4
"""Of the rate of products that a prompt of `PREFILL_PROMISED` tokens is to reach."""
PREFILL_PROMISED = 4096


def judge(scribe: Scribe, rows: Sequence[Mapping[str, Any]], plan: Plan) -> None:
    """Each promise beside what was measured, where anything was."""
    found = {(row["system"], row["metric"], row["size"]): row for row in rows if row["model"] == LARGE}

    def share(metric: str, size: int, least: float, what: str) -> None:
        row = found.get((OURS, metric, size))
        value = None if row is None else row["share"]
        told = "not measured" if not isinstance(value, float) else f"{value:.2f}"
        holds = isinstance(value, float) and value >= least
        scribe.claim(f"{LARGE}: {what} at {least:g} of the roofline or more", told, holds=holds)

    share(DECODE, 1, DECODE_SHARE, "one sequence decodes")
    share(PREFILL, PREFILL_PROMISED, PREFILL_SHARE, f"a prompt of {PREFILL_PROMISED:,} tokens is computed")
    for batch in plan.batches:
        rates = [found.get((system, DECODE, batch), {}).get("tokens_per_second") for system in (OURS, TRANSFORMERS)]
        ours, theirs = rates
        if isinstance(ours, float) and isinstance(theirs, float):
            told, holds = f"{ours:.0f} against {theirs:.0f} tokens/s", ours > theirs
        else:
            told, holds = "not measured", False
        scribe.claim(f"{LARGE}: batch {batch} decodes faster than compiled transformers", told, holds=holds)
