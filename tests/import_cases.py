"""The cases of `benchmarks.imports`, several at a time: each is one thread's work, and most of it writing graphs.

Processes of their own, as torch's exporter holds the interpreter.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from benchmarks import imports
from benchmarks.imports import Case, Outcome

_MAX_PROCESSES = 4


@contextmanager
def checking(cases: Iterable[tuple[Case, int]], workshop: Path) -> Iterator[dict[str, Future[Outcome]]]:
    """What comes of each case by its name, in the order given; what nobody waited for is given up at the end.

    Args:
        cases: with the number of sources that beams are compared on.
        workshop: a folder for all their files.
    """
    processes = min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_prepare) as pool:
        try:
            yield {
                case.name: pool.submit(imports.check, case, workshop / case.name, sources) for case, sources in cases
            }
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare() -> None:
    """As in a test: one thread, one table of operators, and no warning that goes unnoticed."""
    import torch
    import transformers

    from tests.artifacts import keep_operator_table

    torch.set_num_threads(1)
    keep_operator_table()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("error")
