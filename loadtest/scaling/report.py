"""The scaling study as a page, a document and files. Measures nothing: everything shown is in `scaling.json`.

`write` leaves one self-contained HTML page, the pictures, and the results with every raw sample; `write_document` the
Markdown of `docs/results`, its pictures, and the same results, which later runs are compared with. `python -m loadtest
scaling --samples FILE` makes both again from the samples of an earlier run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest import capacity_report
from loadtest.document import DATA, Block, Drawing, Heading, Items, Table, Text, to_page, write_drawings, write_markdown
from loadtest.scaling import fit
from loadtest.scaling.claims import CACHE_TOLERANCE, CLAIMS, ENOUGH_REACH, WITNESSES
from loadtest.scaling.evidence import Evidence, Results
from loadtest.scaling.judge import STABLE
from loadtest.scaling.pictures import PICTURES, Picture

RESULTS = "scaling.json"
PAGE = "scaling.html"
DOCUMENT = "scaling.md"
CAPACITY = "scaling-capacity"
NOISY = 0.05
"""If other processes take more than this share of the machine, the report marks its figures as doubtful, and a run in
which something is refused is inconclusive."""
BUSY = 0.20
"""If they take more than this share, every run is."""
TITLE = "The law: attention costs the square of the length"

_METHOD = (
    "The model has random weights: preset `law` with its context extended to 16,384 tokens and one KV head for all "
    "query heads, so that the keys and values of the longest context fit a processor's last-level cache. It is "
    "exported and served like any other, by a server process of its own, over gRPC at batch 1, one request at a time. "
    "Prefill and decode times are the server's own (`onward.v1.Timings`). Prompts are random token ids and always "
    "new: a cache hit ends the study. Without a cache, the text so far is sent as a new prompt for every token.",
    "Lengths are geometric, up to the context. Each repeat takes every length once, in a new random order, so that "
    "drift of the machine does not look like a slope; a warm-up pass goes first and is not counted.",
    "The median of a length is that of Hodges and Lehmann, of the means of all pairs of its samples: it is steady "
    "where a machine has two speeds. Medians are fitted by non-negative least squares over relative deviations (weight "
    "1 / median). Intervals are 95 % percentile intervals of a case bootstrap within lengths. Degrees are compared by "
    "BIC = J ln(RSS / J) + k ln J over J lengths, whose likelihood assumes that relative deviations of the medians are "
    f"independent and normal, of one unknown variance; a difference above {fit.DECISIVE_BIC:g} decides.",
    "A claim is refused if the interval of its leading coefficient includes 0, if BIC does not prefer it to the "
    f"degree below by more than {fit.DECISIVE_BIC:g}, if its leading term is less than {fit.LEADING_SHARE:.0%} of "
    f"the time at the longest length, if BIC prefers the degree above by more than {fit.DECISIVE_BIC:g} and that "
    f"term is {fit.TOLERANCE:.0%} of it or more, if the curve misses a median by more than {fit.MAX_MISFIT:.0%}, "
    f"or if the fit without the longest length misses it by more than {fit.TOLERANCE:.0%}. For whole prompts, "
    f"the quadratic term must also be {ENOUGH_REACH:g} times the linear one at the longest length.",
    "A token with the cache, and its cross-attention, is linear with a slope of its own in each regime; a prompt is "
    "the sum of such lines over its positions, a quadratic with its own c in each. The knees are not fitted: "
    "they are the lengths at which keys and values fill one of the processor's caches, as the system reports its size. "
    "Until then every token also displaces weights from that cache, which the next step reads from the slower one "
    "behind it; beyond, keys and values come from the slower one. BIC must not prefer n ln n or n^1.5 to such a line, "
    f"n² ln n or n^2.5 to such a quadratic, by more than {fit.DECISIVE_BIC:g}. For a line {fit.TOLERANCE:.0%} becomes "
    f"{CACHE_TOLERANCE:.0%}, because a step of a fraction of a millisecond scatters more. The results also have the "
    "verdicts on a single regime, under `linear` and `quadratic`.",
    "Resamples of the samples are judged in the same way. If less than "
    f"{STABLE:.0%} of them have the verdict of the run, it is inconclusive. So it is if other processes took more than "
    f"{BUSY:.0%} of the machine, or more than {NOISY:.0%} and something is refused.",
)
_RIVALS: Mapping[str, str] = {
    "linear": "synthetic times that are linear",
    "linearithmic": "synthetic times that grow with n ln n",
    "three_halves": "synthetic times that grow with n^1.5",
    "cube": "synthetic times with a cube in place of the square",
}
_CACHED_RIVALS: Mapping[str, str] = {
    "linearithmic": "that grow with n ln n",
    "three_halves": "that grow with n^1.5",
    "quadratic": "that grow with n²",
    "square": "with the measured constant and a square",
}
_NO_CAPACITY = (
    "Not measured with this run: `python -m loadtest capacity` measures a running server, and "
    "`python -m loadtest scaling --samples FILE --capacity build/load/capacity.json` shows it here."
)


def write(results: Results, folder: Path) -> Path:
    """Writes the page, the pictures and the results into a folder; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = blocks(results)
    write_drawings(shown, folder)
    (folder / RESULTS).write_text(dump(results), encoding="utf-8")
    page = folder / PAGE
    page.write_text(to_page(TITLE, shown, results), encoding="utf-8")
    return page


def write_document(results: Results, folder: Path) -> Path:
    """Writes the document, and its pictures and the results under `data`; returns the document's path."""
    document = write_markdown(blocks(results), folder / DOCUMENT)
    (folder / DATA / RESULTS).write_text(dump(results), encoding="utf-8")
    return document


def dump(results: Results) -> str:
    """JSON with one line per figure and per series, so that diffs are readable."""
    parts = []
    for key, value in results.items():
        if isinstance(value, Mapping) and value:
            inner = ",\n".join(
                f"  {json.dumps(name)}: {json.dumps(item, allow_nan=False)}" for name, item in value.items()
            )
            parts.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def blocks(results: Results, pictures: Sequence[Picture] = PICTURES) -> list[Block]:
    """The report's content."""
    evidence = Evidence(results)
    state = {True: "holds", False: "refused", None: "open"}[results["law_holds"]]
    problems = [] if results["quick"] else [*results["objections"], *results["drift"]["objections"]]
    shown: list[Block] = [Heading(TITLE, 1), Text(_verdict(results), state), Items(problems)]
    shown += [Heading("Figures"), claims_table(results, 2), claims_table(results, 1)]
    shown += [Heading("Controls"), Items(controls(results)), Text(_compared(results))]
    for picture in pictures:
        drawing = Drawing(f"scaling-{picture.name}", picture.title, picture.caption(evidence), picture.svg(evidence))
        shown += [Heading(picture.title), drawing]
    shown.append(Heading("Capacity"))
    if (capacity := results["capacity"]) is None:
        shown.append(Text(_NO_CAPACITY))
    else:
        shown += capacity_report.blocks(capacity, CAPACITY)
    return [*shown, Heading("Method"), *map(Text, _METHOD), Heading("Conditions"), Text(conditions(results))]


def claims_table(results: Results, degree: int) -> Table:
    """The claims of a degree with every figure that decides."""
    claims = [claim for claim in (*CLAIMS, *WITNESSES) if claim.degree == degree]
    cells = _quadratic_cells if degree == 2 else _linear_cells
    rows = []
    for claim in claims:
        each = results[claim.series]
        rows.append(
            {
                f"seconds(n) = a + bn{' + cn²' if degree == 2 else ''}": claim.name,
                "a, ms": f"{1e3 * each['a']:.3g}",
                **cells(each),
                f"{'cubic' if degree == 2 else 'quadratic'} term": f"{each['next_share']:.1%}",
                "largest misfit": f"{each['misfit']:.1%}",
                "longest extrapolated": f"{each['leave_longest_out_error']:.1%} off",
                "verdict": "holds" if each["holds"] else "refused",
            }
        )
    return Table([list(rows[0]), *(list(row.values()) for row in rows)])


def _quadratic_cells(each: Mapping[str, Any]) -> dict[str, str]:
    return {
        "b, µs/token": f"{1e6 * each['b']:.3g}",
        "c, ns/token² (95 %)": f"{1e9 * each['c']:.3g} ({1e9 * each['c_low']:.3g}…{1e9 * each['c_high']:.3g})",
        **_regime_cells(each, "c", "c_by_regime"),
        "n*, tokens (95 %)": _lengths(each, "n_star"),
        "longest, tokens": f"{each['longest']:,.0f}" + ("" if each["reach"] is None else f" = {each['reach']:.1f} n*"),
        "BIC(linear) - BIC(quadratic)": f"{each['bic_linear'] - each['bic_quadratic']:+.0f}",
        "BIC(quadratic) - BIC(cubic)": f"{each['bic_quadratic'] - each['bic_cubic']:+.0f}",
    }


def _linear_cells(each: Mapping[str, Any]) -> dict[str, str]:
    slope = f"{1e9 * each['slope']:.3g} ({1e9 * each['slope_low']:.3g}…{1e9 * each['slope_high']:.3g})"
    return {
        "b, ns/token (95 %)": slope,
        **_regime_cells(each, "b", "slopes"),
        "as much as a, tokens (95 %)": _lengths(each, "crossover"),
        "longest, tokens": f"{each['longest']:,.0f}",
        "BIC(constant) - BIC(linear)": f"{each['bic_constant'] - each['bic_linear']:+.0f}",
        "BIC(linear) - BIC(quadratic)": f"{each['bic_linear'] - each['bic_quadratic']:+.0f}",
    }


def _regime_cells(each: Mapping[str, Any], symbol: str, figures: str) -> dict[str, str]:
    return {
        f"{symbol} by regime": ", ".join(f"{1e9 * value:.3g}" for value in each[figures]),
        "knees, tokens": ", ".join(f"{value:,.0f}" for value in each["knees"]) or "-",
    }


def controls(results: Results) -> list[str]:
    """The verdicts on synthetic times and on the recurrent model, a line each."""
    found, chunk = results["controls"], results["settings"]["chunk"]
    model = "a recurrent model of equal size, in the same runtime, that reads"
    asked = {**_RIVALS, "gru": f"{model} {chunk} tokens a run, as the server does", "gru_whole": f"{model} in one run"}
    lines = []
    for name, what in asked.items():
        if f"{name}_rejects_quadratic" not in found:
            lines.append(f"{what}: not measured")
        elif found[f"{name}_rejects_quadratic"]:
            objections = found[f"{name}_objections"]
            alone = " (the only objection)" if len(objections) == 1 else ""
            lines.append(f"{what}: no quadratic, because {'; '.join(objections)}{alone}")
        else:
            lines.append(f"{what}: **wrongly found quadratic**")
    for name, what in _CACHED_RIVALS.items():
        refused = "; ".join(found[f"cached_{name}_objections"])
        verdict = f"no line, because {refused}" if refused else "**wrongly found linear**"
        lines.append(f"synthetic times of a cached token {what}: {verdict}")
    for law, what in (("quadratic", "synthetic times"), ("cached_linear", "synthetic times of a cached token")):
        word = law.removeprefix("cached_")
        accepted = f"found {word}" if found[f"{law}_accepted"] else "**wrongly refused**"
        lines.append(f"{what} that are {word}: {accepted}")
    return lines


def conditions(results: Results) -> str:
    """Machine, settings, versions, and how to measure again."""
    settings, machine = results["settings"], results["machine"]
    packages = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    share = results["facts"]["others_share"]
    others = "The load of other processes is unknown"
    if share is not None:
        doubt = ": **these figures are doubtful**" if share > NOISY else ""
        others = f"Other processes took {share:.1%} of the machine{doubt}"
    settled = ""
    if settle := settings["settle"]:
        settled = (
            f"A prompt as long, but of at most {settle:,} tokens, precedes each sample and is not counted: caches and "
            "threads are in the state that a sequence of requests leaves. "
        )
    measured = f"Measured {results['date']} on {machine['processor']}, {machine['cores']} processors, fp32; {packages}"
    return (
        f"{settings['num_lengths']} lengths a series, {settings['repeats']} samples of each, {settings['threads']} "
        f"threads, chunks of {settings['chunk']} tokens; {results['seconds']:.0f} s in all. {settled}{measured}. "
        f"{others}. `make scaling` measures again; every raw sample is in `{DATA}/{RESULTS}` under `series`, as pairs "
        f"of a length and seconds (memory: bytes); `python -m loadtest scaling --samples {RESULTS}` judges them again."
    )


def _verdict(results: Results) -> str:
    prefill, decode = results["prefill"], results["decode"]
    if results["quick"]:
        return "A quick run, a smoke test: too few samples of too short texts for any verdict."
    if results["law_holds"] is None:
        return f"**Inconclusive**: {results['doubt']}."
    if not results["law_holds"]:
        return "**The law is refused** on this machine with this version of the service."
    return (
        f"**The law holds.** Prefill takes a + bn + cn² with c = {1e9 * prefill['c']:.3g} ns/token² "
        f"({1e9 * prefill['c_low']:.3g}…{1e9 * prefill['c_high']:.3g}{_by_regime(prefill, 'c_by_regime')}) and n* = "
        f"{_length(prefill['n_star'])} tokens: beyond that, attention costs more than the linear part. A token with "
        f"the KV cache is linear in its context, {1e9 * decode['slope']:.3g} ns per token of it "
        f"({1e9 * decode['slope_low']:.3g}…{1e9 * decode['slope_high']:.3g}{_by_regime(decode, 'slopes')}); without "
        "the cache it is quadratic. "
        f"{results['agreement']:.1%} of {results['draws'] // 2:,} resamples of the samples have the same verdict."
    )


def _by_regime(each: Mapping[str, Any], figures: str) -> str:
    """The coefficients of a law with knees, in words."""
    if not each["knees"]:
        return ""
    values = ", then ".join(f"{1e9 * value:.3g}" for value in each[figures])
    return f"; {values}, with the knee at {', '.join(f'{knee:,.0f}' for knee in each['knees'])}"


def _compared(results: Results) -> str:
    drift = results["drift"]
    if drift["compared"] is None:
        return f"Not compared with a baseline: {drift['reason']}."
    ratios = (f"{name} {'-' if ratio is None else f'{ratio:.2f}'}" for name, ratio in drift["compared"].items())
    return f"Ratios to the baseline: {', '.join(ratios)}."


def _lengths(each: Mapping[str, Any], name: str) -> str:
    return f"{_length(each[name])} ({_length(each[f'{name}_low'])}…{_length(each[f'{name}_high'])})"


def _length(value: float | None) -> str:
    """A crossover; None is infinite."""
    return "∞" if value is None else f"{value:,.0f}"
