"""Parallel text: tab-separated lines of a source and its target.

No quoting and no header: what stands before the tab is the source. Knows nothing of what the texts mean.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from model.data.corpus import Reading, TextPair
from model.data.files import DataError, numbered_lines

SUFFIXES = frozenset({".tsv"})


def read(path: Path) -> Reading[TextPair]:
    """The pairs of one file.

    Raises:
        DataError: naming file and line of what is not two columns or not UTF-8.
    """
    pairs = []
    for number, line in numbered_lines(path):
        columns = line.split("\t")
        if len(columns) != 2:
            raise DataError(f"{path}:{number}: columns are {len(columns)}, must be 2 (source, tab, target)")
        pairs.append(TextPair(*columns))
    return Reading(pairs, Counter())
