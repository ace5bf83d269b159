"""One stage, in the process that it has for itself: started by `benchmarks.gpu_check`, which has begun its results.

    python -m benchmarks.gpu.stage ORDER        an `Order` as JSON

Exit status: 0 it came to its end, 1 not so; what it found until then is written down either way.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.launch import Order
from benchmarks.gpu.plan import make_plan
from benchmarks.gpu.results import REST, Journal, Scribe

if TYPE_CHECKING:
    from benchmarks.gpu.workshop import Workshop

_MODULES = {"small": "speed"}
"""Parts that are another one's with other models."""


def main(arguments: Sequence[str]) -> int:
    """What a process does."""
    return 0 if carry_out(Order.from_json(arguments[0])) else 1


def carry_out(order: Order) -> bool:
    """Runs a stage; what it fails with is written down. Whether it came to its end."""
    journal = Journal(order.results)
    scribe = Scribe.resume(order.stage.name, journal)
    try:
        part = order.stage.part
        importlib.import_module(f"benchmarks.gpu.{_MODULES.get(part, part)}").run(_make_bench(order, journal), scribe)
    except Exception as error:
        traceback.print_exc()
        scribe.leave_out(REST, f"{type(error).__name__}: {str(error).strip() or 'no message'}")
        return False
    scribe.end()
    return True


def _make_bench(order: Order, journal: Journal) -> Bench:
    plan = make_plan(order.device, is_quick=order.is_quick)

    @cache
    def open_workshop() -> Workshop:
        # Needs what makes graphs, which not every part does.
        from benchmarks.gpu.workshop import Workshop

        return Workshop(plan, order.work / "graphs", order.artifacts, _tell)

    return Bench(order.stage, plan, open_workshop, journal, order.work, order.corpus, order.ends)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
