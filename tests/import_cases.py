"""The cases of the `imports` benchmark, several at a time: each is one thread's work, and most of it writing graphs.

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

from benchmarks.scenarios import imports
from benchmarks.scenarios._import_cases import Case
from benchmarks.scenarios.imports import Outcome

_MAX_PROCESSES = 4


@contextmanager
def checking(cases: Iterable[tuple[Case, int]], workshop: Path) -> Iterator[dict[str, Future[Outcome]]]:
    """Outcomes by case, in the order given; those that no test waited for are canceled at the end.

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
