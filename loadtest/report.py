"""The scaling study as a page, a document and files. Measures nothing: everything shown is in `scaling.json`.

`write` leaves one self-contained HTML page, the pictures as SVG and PNG, and the results with every raw sample;
`write_document` the Markdown of `docs`, its pictures, and the same results, which later runs are compared with. Both
are made anew from samples taken before by `python -m loadtest scaling --samples FILE`.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest import capacity_report, fit
from loadtest.claims import CACHE_TOLERANCE, CLAIMS, ENOUGH_REACH, WITNESSES
from loadtest.pictures import PICTURES, Evidence, Picture, draw
from loadtest.tables import Table, to_html, to_markdown

RESULTS = "scaling.json"
PAGE = "scaling.html"
DOCUMENT = "scaling.md"
CAPACITY = "scaling-capacity"
NOISY = 0.05
"""The share of the machine taken by others from which on a report says that its figures are doubtful."""
BUILD = Path("build/scaling")
DOCS = Path("docs/results")
TITLE = "The law: attention costs the square of the length"
_CAPACITY_TITLE = "Capacity"

Results = Mapping[str, Any]

_METHOD = (
    "A model with random weights and little of everything but context (preset `law`, its context stretched to 16,384 "
    "tokens, of which its weights know nothing, and one head of keys and values for all its queries, so that those of "
    "the longest context stay in a processor's last cache) is exported and served as any other is, by a server process "
    "of its own, and asked over gRPC at batch 1, one request at a time. Times of prefill and decoding are the server's "
    "own (`onward.v1.Timings`); prompts are random token ids, all new, and an answer that found any of them at hand "
    "ends the study. Without a cache the text so far is sent as a new prompt for every token.",
    "Lengths are geometric and go as far as the context does. Each repeat takes all of them once, in a new random "
    "order, so that a machine that drifts does not look like a slope; a pass that does not count goes first.",
    "What is fitted are medians, by non-negative least squares over relative deviations (weight 1 / median). Intervals "
    "are 95 % percentile intervals of a case bootstrap within lengths. Degrees are compared by BIC = J ln(RSS / J) + "
    "k ln J over J lengths, whose likelihood says that relative deviations of the medians are independent and normal, "
    f"of one unknown variance; a difference above {fit.DECISIVE_BIC:g} decides.",
    "A law is refused when the interval of its leading coefficient includes 0, when BIC does not prefer it to the "
    f"degree below by more than {fit.DECISIVE_BIC:g}, when its leading term is less than {fit.LEADING_SHARE:.0%} of "
    f"the time at the longest length, when BIC prefers the degree above by more than {fit.DECISIVE_BIC:g} and that "
    f"term is {fit.TOLERANCE:.0%} of it or more, when the curve misses a median by more than {fit.MAX_MISFIT:.0%}, "
    f"or when the fit without the longest length misses it by more than {fit.TOLERANCE:.0%}. For a token with the "
    f"cache and for cross-attention {fit.TOLERANCE:.0%} are {CACHE_TOLERANCE:.0%}: keys and values leave the "
    "processor's caches on the way, and memory is slower. Of whole prompts, lengths must reach "
    f"{ENOUGH_REACH:g} n* besides.",
)
_RIVALS: Mapping[str, str] = {
    "linear": "made-up times that are linear",
    "linearithmic": "made-up times that grow with n ln n",
    "three_halves": "made-up times that grow with n to the power of 1.5",
}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: 0.8rem; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: 0.3rem 0.5rem; border-bottom: 1px solid #ddd; text-align: right; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 2rem 0; } figure svg { max-width: 100%; height: auto; }
figcaption { color: #444; font-size: 0.9rem; max-width: 46rem; }
.holds { border-left: 0.4rem solid #009e73; padding-left: 1rem; }
.refused { border-left: 0.4rem solid #d55e00; padding-left: 1rem; }
.open { border-left: 0.4rem solid #999999; padding-left: 1rem; }
"""
_NO_CAPACITY = (
    "Not measured with this run: `python -m loadtest capacity` measures a running server, and "
    "`python -m loadtest scaling --samples FILE --capacity build/load/capacity.json` shows it here."
)


def write(results: Results, folder: Path) -> Path:
    """Writes the page, the pictures and the results into a folder; returns where the page is."""
    folder.mkdir(parents=True, exist_ok=True)
    evidence = Evidence(results)
    drawn = {picture: draw(picture, evidence) for picture in PICTURES}
    for picture, svg in drawn.items():
        (folder / f"scaling-{picture.name}.svg").write_bytes(svg)
        (folder / f"scaling-{picture.name}.png").write_bytes(draw(picture, evidence, "png"))
    _write_capacity(results, folder, "svg", "png")
    (folder / RESULTS).write_text(dump(results), encoding="utf-8")
    page = folder / PAGE
    page.write_text(render_page(results, evidence, drawn), encoding="utf-8")
    return page


def write_document(results: Results, folder: Path) -> Path:
    """Writes the document, its pictures and the results into a folder; returns where the document is."""
    folder.mkdir(parents=True, exist_ok=True)
    evidence = Evidence(results)
    for picture in PICTURES:
        (folder / f"scaling-{picture.name}.svg").write_bytes(draw(picture, evidence))
    _write_capacity(results, folder, "svg")
    (folder / RESULTS).write_text(dump(results), encoding="utf-8")
    document = folder / DOCUMENT
    document.write_text(render_document(results, evidence), encoding="utf-8")
    return document


def _write_capacity(results: Results, folder: Path, *file_formats: str) -> None:
    if results["capacity"] is not None:
        for file_format in file_formats:
            drawing = capacity_report.draw_picture(results["capacity"], file_format)
            (folder / f"{CAPACITY}.{file_format}").write_bytes(drawing)


def dump(results: Results) -> str:
    """JSON with a line for each figure and each series, so that a difference between two files can be read."""
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


def render_document(results: Results, evidence: Evidence) -> str:
    """The study in Markdown, pictures beside it."""
    blocks = [f"# {TITLE}", _verdict(results), _list(_problems(results))]
    blocks += ["## Figures", to_markdown(quadratic_table(results)), to_markdown(linear_table(results))]
    blocks += ["## Controls", _list(controls(results)), _compared(results)]
    for picture in PICTURES:
        name = f"scaling-{picture.name}.svg"
        blocks += [f"## {picture.title}", f"![{picture.title}]({name})", picture.caption(evidence)]
    blocks.append(f"## {_CAPACITY_TITLE}")
    if (found := results["capacity"]) is None:
        blocks.append(_NO_CAPACITY)
    else:
        blocks += [f"![{_CAPACITY_TITLE}]({CAPACITY}.svg)", capacity_report.describe(found)]
        blocks += [to_markdown(capacity_report.table(found)), _list(capacity_report.doubts_of(found))]
    blocks += ["## Method", *_METHOD, "## Conditions", conditions(results)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def render_page(results: Results, evidence: Evidence, drawn: Mapping[Picture, bytes]) -> str:
    """The study as one HTML page that needs no other file: pictures and raw samples are in it."""
    state = {True: "holds", False: "refused", None: "open"}[results["law_holds"]]
    blocks = [f'<h1>{html.escape(TITLE)}</h1><p class="{state}">{_inline(_verdict(results))}</p>']
    blocks += [_items(_problems(results))]
    blocks += ["<h2>Figures</h2>", to_html(quadratic_table(results)), to_html(linear_table(results))]
    blocks += ["<h2>Controls</h2>", _items(controls(results)), f"<p>{_inline(_compared(results))}</p>"]
    for picture, svg in drawn.items():
        drawing = _standalone(svg.decode(), picture.name)
        blocks.append(
            f'<figure id="{picture.name}"><h2>{html.escape(picture.title)}</h2>{drawing}'
            f"<figcaption>{html.escape(picture.caption(evidence))}</figcaption></figure>"
        )
    if (found := results["capacity"]) is None:
        blocks += [f"<h2>{_CAPACITY_TITLE}</h2>", f"<p>{_inline(_NO_CAPACITY)}</p>"]
    else:
        drawing = _standalone(capacity_report.draw_picture(found).decode(), "capacity")
        blocks.append(f'<figure id="capacity"><h2>{_CAPACITY_TITLE}</h2>{drawing}')
        blocks[-1] += f"<figcaption>{_inline(capacity_report.describe(found))}</figcaption></figure>"
        blocks += [to_html(capacity_report.table(found)), _items(capacity_report.doubts_of(found))]
    blocks += ["<h2>Method</h2>", *(f"<p>{_inline(text)}</p>" for text in _METHOD)]
    blocks += ["<h2>Conditions</h2>", f"<p>{_inline(conditions(results))}</p>"]
    raw = json.dumps(results, allow_nan=False).replace("</", "<\\/")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(TITLE)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>\n'
        + "\n".join(block for block in blocks if block)
        + f'\n<script type="application/json" id="results">{raw}</script>\n</body></html>\n'
    )


def quadratic_table(results: Results) -> Table:
    """Claims of a square, with every figure that decides."""
    rows: list[tuple[str, ...]] = [
        (
            "seconds(n) = a + bn + cn²",
            "a, ms",
            "b, µs/token",
            "c, ns/token² (95 %)",
            "n* = b/c, tokens (95 %)",
            "longest, tokens",
            "BIC: line less square",
            "BIC: square less cube",
            "cubic term",
            "largest misfit",
            "longest foretold",
            "verdict",
        )
    ]
    for claim in (*CLAIMS, *WITNESSES):
        if claim.degree != 2:
            continue
        each = results[claim.series]
        rows.append(
            (
                claim.name,
                f"{1e3 * each['a']:.3g}",
                f"{1e6 * each['b']:.3g}",
                f"{1e9 * each['c']:.3g} ({1e9 * each['c_low']:.3g}…{1e9 * each['c_high']:.3g})",
                f"{_length(each['n_star'])} ({_length(each['n_star_low'])}…{_length(each['n_star_high'])})",
                f"{each['longest']:,.0f}" + ("" if each["reach"] is None else f" = {each['reach']:.1f} n*"),
                f"{each['bic_linear'] - each['bic_quadratic']:+.0f}",
                f"{each['bic_quadratic'] - each['bic_cubic']:+.0f}",
                *_ends_of_row(each),
            )
        )
    return rows


def linear_table(results: Results) -> Table:
    """Claims of a line."""
    rows: list[tuple[str, ...]] = [
        (
            "seconds(n) = a + bn",
            "a, ms",
            "b, ns/token (95 %)",
            "a/b, tokens (95 %)",
            "longest, tokens",
            "BIC: constant less line",
            "BIC: line less square",
            "quadratic term",
            "largest misfit",
            "longest foretold",
            "verdict",
        )
    ]
    for claim in (*CLAIMS, *WITNESSES):
        if claim.degree != 1:
            continue
        each = results[claim.series]
        between = f"({_length(each['crossover_low'])}…{_length(each['crossover_high'])})"
        rows.append(
            (
                claim.name,
                f"{1e3 * each['a']:.3g}",
                f"{1e9 * each['slope']:.3g} ({1e9 * each['slope_low']:.3g}…{1e9 * each['slope_high']:.3g})",
                f"{_length(each['crossover'])} {between}",
                f"{each['longest']:,.0f}",
                f"{each['bic_constant'] - each['bic_linear']:+.0f}",
                f"{each['bic_linear'] - each['bic_quadratic']:+.0f}",
                *_ends_of_row(each),
            )
        )
    return rows


def _ends_of_row(each: Mapping[str, Any]) -> tuple[str, ...]:
    """What both tables end with."""
    return (
        f"{each['next_share']:.1%}",
        f"{each['misfit']:.1%}",
        f"{each['leave_longest_out_error']:.1%} off",
        "holds" if each["holds"] else "refused",
    )


def controls(results: Results) -> list[str]:
    """What the same judge says of times that are no square, and of made-up ones that are, a line for each."""
    found, chunk = results["controls"], results["settings"]["chunk"]
    model = "a recurrent model of equal size, in the same runtime, that reads"
    asked = {**_RIVALS, "gru": f"{model} {chunk} tokens a run, as the server does", "gru_whole": f"{model} in one run"}
    lines = []
    for name, what in asked.items():
        if f"{name}_rejects_quadratic" not in found:
            lines.append(f"{what}: not measured")
        elif found[f"{name}_rejects_quadratic"]:
            objections = found[f"{name}_objections"]
            alone = ", and nothing else speaks against one" if len(objections) == 1 else ""
            lines.append(f"{what}: no square, for {'; '.join(objections)}{alone}")
        else:
            lines.append(f"{what}: **a square, and there is none**")
    lines.append("made-up times that are a square: " + ("one" if found["quadratic_accepted"] else "**none is found**"))
    return lines


def conditions(results: Results) -> str:
    """What was measured on what, and how to measure it again."""
    settings, machine = results["settings"], results["machine"]
    packages = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    share = results["facts"]["others_share"]
    others = "Nobody knows what else ran" if share is None else f"Other processes took {share:.1%} of the machine"
    doubt = ": **these figures are doubtful**" if share is not None and share > NOISY else ""
    settled = ""
    if settle := settings["settle"]:
        settled = (
            f"Before each sample went a prompt as long, or of {settle:,} tokens where that is shorter, which does not "
            "count: caches and threads are as a sequence of requests finds them, not as another length has left them. "
        )
    measured = f"Measured {results['date']} on {machine['processor']}, {machine['cores']} processors, fp32; {packages}"
    return (
        f"{settings['num_lengths']} lengths a series, {settings['repeats']} samples of each, {settings['threads']} "
        f"threads, chunks of {settings['chunk']} tokens; {results['seconds']:.0f} s in all. {settled}{measured}. "
        f"{others}{doubt}. "
        f"`make scaling` measures it anew; every raw sample is in `{RESULTS}` under `series`, as pairs of a length and "
        f"seconds (memory: bytes), and `python -m loadtest scaling --samples {RESULTS}` fits and judges them again."
    )


def _verdict(results: Results) -> str:
    prefill, decode = results["prefill"], results["decode"]
    if results["quick"]:
        return "A quick run, to see that it works: too few samples of too short texts for any verdict."
    if not results["law_holds"]:
        return "**The law is refused** on this machine, as the service is now."
    return (
        f"**The law holds.** Prefill takes a + bn + cn² with c = {1e9 * prefill['c']:.3g} ns/token² "
        f"({1e9 * prefill['c_low']:.3g}…{1e9 * prefill['c_high']:.3g}) and n* = {_length(prefill['n_star'])} tokens: "
        "beyond that, attention costs more than what each token costs by itself. A token with the cache is linear in "
        f"its context, {1e9 * decode['slope']:.3g} ns for each token of it; without the cache it is quadratic."
    )


def _problems(results: Results) -> list[str]:
    """What speaks against the law; empty where nothing does or nothing is decided."""
    return [] if results["quick"] else [*results["objections"], *results["drift"]["objections"]]


def _compared(results: Results) -> str:
    """The comparison with the baseline in words."""
    drift = results["drift"]
    if drift["compared"] is None:
        return f"Not compared with a baseline: {drift['reason']}."
    ratios = ", ".join(
        f"{name} {'-' if ratio is None else f'{ratio:.2f}'}" for name, ratio in drift["compared"].items()
    )
    return f"Over the baseline's: {ratios}."


def _length(value: float | None) -> str:
    """A crossover; None is one that is never reached."""
    return "∞" if value is None else f"{value:,.0f}"


def _list(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _items(lines: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{_inline(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _inline(markdown: str) -> str:
    """The two marks that the texts here use, strong and code, as HTML."""
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(markdown))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)


def _standalone(svg: str, name: str) -> str:
    """A picture to stand in a page beside others: without its prologue, and with ids that begin with its name."""
    svg = svg[svg.index("<svg") :]
    for before, after in (('id="', f'id="{name}-'), ('href="#', f'href="#{name}-'), ("url(#", f"url(#{name}-")):
        svg = svg.replace(before, after)
    return svg
