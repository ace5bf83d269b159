"""Conditions under which a benchmark fails, such as `ttft_p99>0.5`, and their verdicts as JUnit's XML.

A name is a latency, METRIC_STATISTIC in seconds (`ttft_p99`, `e2el_mean`, `tpot_median`), or a number of the report by
its own name (`failed`, `request_throughput`). A figure that no request has meets every condition: nothing was measured.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import numpy as np

from loadtest.core.figures import METRICS, Run, values_of

_COMPARED = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
_FORM = re.compile(r"(?P<name>\w+(?:\.\d+)?)\s*(?P<sign>[<>]=?)\s*(?P<limit>\S+)")
_LATENCY = re.compile(rf"(?P<metric>{'|'.join(METRICS)})_(?P<statistic>mean|median|p(?P<share>\d+(?:\.\d+)?))")


@dataclass(frozen=True, slots=True)
class Condition:
    """A figure's `name`, how it is compared, and the `limit`."""

    name: str
    sign: str
    limit: float

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.limit:g}"

    def complaint(self, run: Run, report: Mapping[str, Any]) -> str | None:
        """Why a run fails by this; None if it does not.

        Raises:
            ValueError: if the report has no such number.
        """
        latency = _LATENCY.fullmatch(self.name)
        value = _latency(run, latency) if latency else report.get(self.name, math.nan)
        if value is None:
            return f"{self}: no request has a {self.name}"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            raise ValueError(f"--fail-if: {str(self)!r}: the report has no number {self.name!r}")
        return f"{self}: it is {value:.6g}" if _COMPARED[self.sign](value, self.limit) else None


def parse_condition(text: str) -> Condition:
    """Parses a condition.

    Raises:
        ValueError: if it is none.
    """
    found = _FORM.fullmatch(text.strip())
    try:
        limit = float(found["limit"]) if found else math.nan
    except ValueError:
        limit = math.nan
    latency = _LATENCY.fullmatch(found["name"]) if found else None
    is_share = latency is None or latency["share"] is None or float(latency["share"]) <= 100.0
    if found is None or not math.isfinite(limit) or not is_share:
        raise ValueError(f"--fail-if: {text!r} is no condition like ttft_p99>0.5 or request_throughput<2")
    return Condition(found["name"], found["sign"], limit)


def to_junit(verdicts: Sequence[tuple[Condition, str | None]], seconds: float) -> str:
    """A test case for each condition, failed if it has a complaint."""
    num_failed = sum(complaint is not None for _, complaint in verdicts)
    counts = {"tests": str(len(verdicts)), "failures": str(num_failed), "time": f"{seconds:.3f}"}
    suite = ElementTree.Element("testsuite", {"name": "onward bench", **counts})
    for condition, complaint in verdicts:
        case = ElementTree.SubElement(suite, "testcase", {"classname": "bench", "name": f"not {condition}"})
        if complaint is not None:
            ElementTree.SubElement(case, "failure", {"message": complaint})
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _latency(run: Run, found: re.Match[str]) -> float | None:
    """A statistic of finished requests in seconds; None without any."""
    values = values_of(run, found["metric"])
    if not values:
        return None
    if found["share"] is not None:
        return float(np.percentile(values, float(found["share"])))
    return float(np.mean(values) if found["statistic"] == "mean" else np.median(values))
