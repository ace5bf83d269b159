"""The scaling study as a page, a document and files. Measures nothing: everything shown is in `scaling.json`.

    python -m loadtest.report [build/scaling/scaling.json] [--out DIR] [--docs]

`write` leaves one self-contained HTML page, the pictures as SVG and PNG, and the results with every raw sample;
`write_document` the Markdown of `docs`, its pictures, and the same results, which later runs are compared with.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.capacity_report import draw_picture
from loadtest.pictures import PICTURES, Evidence, Picture, draw

RESULTS = "scaling.json"
PAGE = "scaling.html"
DOCUMENT = "scaling.md"
NOISY = 0.05
"""The share of the machine taken by others from which on a report says that its figures are doubtful."""
BUILD = Path("build/scaling")
DOCS = Path("docs")
_CAPACITY_TITLE = "Capacity"
TITLE = "The law: attention costs the square of the length"

Results = Mapping[str, Any]
Table = Sequence[Sequence[str]]
"""A row of headings, then rows."""

_QUADRATIC = {
    "prefill": "prefill, whole prompt",
    "prefill_chunked": "prefill, in chunks",
    "no_cache": "a token without the cache",
    "encoder": "encoding a source",
    "end_to_end": "first token, by a plain client",
    "locust": "first token, by Locust's user",
}
_LINEAR = {"decode": "a token with the cache", "cross_attention": "a token's cross-attention"}
_METHOD = (
    "A model with random weights and little of everything but context (preset `law`, its context stretched to 16,384 "
    "tokens, of which its weights know nothing) is exported and served as any other is, by a server process of its "
    "own, and asked over gRPC at batch 1, one request at a time. Times of prefill and decoding are the server's own "
    "(`onward.v1.Timings`); prompts are random token ids, all new, and an answer that found any of them at hand ends "
    "the study. Without a cache the text so far is sent as a new prompt for every token.",
    "Lengths are geometric and go as far as the context does. Each repeat takes all of them once, in a new random "
    "order, so that a machine that drifts does not look like a slope; a pass that does not count goes first.",
    "What is fitted are medians, by non-negative least squares over relative deviations (weight 1 / median). Intervals "
    "are 95 % percentile intervals of a case bootstrap within lengths. Degrees are compared by BIC = J ln(RSS / J) + "
    "k ln J over J lengths, whose likelihood says that relative deviations of the medians are independent and normal, "
    "of one unknown variance; a difference above 10 decides.",
    "A law is refused when the interval of its leading coefficient includes 0, when BIC does not prefer it to the "
    "degree below by more than 10, when its leading term is less than a tenth of the time at the longest length, when "
    "BIC prefers the degree above by more than 10 and that term is a tenth or more, or when the fit without the "
    "longest length misses it by more than 10 %.",
)
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: 0.85rem; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: 0.3rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 2rem 0; } figure svg { max-width: 100%; height: auto; }
figcaption { color: #444; font-size: 0.9rem; max-width: 46rem; }
.holds { border-left: 0.4rem solid #009e73; padding-left: 1rem; }
.refused { border-left: 0.4rem solid #d55e00; padding-left: 1rem; }
"""


CAPACITY = "scaling-capacity.svg"
_NO_CAPACITY = (
    "Not measured with this run: `python -m loadtest capacity --target HOST:PORT` measures a running server, and "
    "`--capacity build/load/capacity.json` shows it here."
)


def write(results: Results, folder: Path) -> Path:
    """Writes the page, the pictures and the results into a folder; returns where the page is."""
    folder.mkdir(parents=True, exist_ok=True)
    evidence = Evidence(results)
    drawn = {picture: draw(picture, evidence) for picture in PICTURES}
    for picture, svg in drawn.items():
        (folder / f"scaling-{picture.name}.svg").write_bytes(svg)
        (folder / f"scaling-{picture.name}.png").write_bytes(draw(picture, evidence, "png"))
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
    (folder / RESULTS).write_text(dump(results), encoding="utf-8")
    if results["capacity"] is not None:
        (folder / CAPACITY).write_text(draw_picture(results["capacity"]), encoding="utf-8")
    document = folder / DOCUMENT
    document.write_text(render_document(results, evidence), encoding="utf-8")
    return document


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
    blocks = [f"# {TITLE}", _verdict(results), *_problems(results)]
    blocks += ["## Figures", _markdown(quadratic_table(results)), _markdown(linear_table(results)), _controls(results)]
    for picture in PICTURES:
        name = f"scaling-{picture.name}.svg"
        blocks += [f"## {picture.title}", f"![{picture.title}]({name})", picture.caption(evidence)]
    drawing = [] if results["capacity"] is None else [f"![{_CAPACITY_TITLE}]({CAPACITY})"]
    blocks += [f"## {_CAPACITY_TITLE}", *drawing, capacity(results["capacity"])]
    blocks += ["## Method", *_METHOD, "## Conditions", conditions(results)]
    return "\n\n".join(blocks) + "\n"


def render_page(results: Results, evidence: Evidence, drawn: Mapping[Picture, bytes]) -> str:
    """The study as one HTML page that needs no other file: pictures and raw samples are in it."""
    state = "holds" if results["law_holds"] else "refused"
    blocks = [f'<h1>{html.escape(TITLE)}</h1><p class="{state}">{_inline(_verdict(results))}</p>']
    if problems := _problems(results):
        blocks.append(
            "<ul>" + "".join(f"<li>{_inline(problem[2:])}</li>" for problem in problems[0].splitlines()) + "</ul>"
        )
    blocks += ["<h2>Figures</h2>", _html(quadratic_table(results)), _html(linear_table(results))]
    blocks.append(f"<p>{_inline(_controls(results))}</p>")
    for picture, svg in drawn.items():
        drawing = _standalone(svg.decode(), picture.name)
        blocks.append(
            f'<figure id="{picture.name}"><h2>{html.escape(picture.title)}</h2>{drawing}'
            f"<figcaption>{html.escape(picture.caption(evidence))}</figcaption></figure>"
        )
    if results["capacity"] is not None:
        drawing = _standalone(draw_picture(results["capacity"]), "capacity")
        blocks.append(f'<figure id="capacity"><h2>{_CAPACITY_TITLE}</h2>{drawing}')
        blocks[-1] += f"<figcaption>{_inline(capacity(results['capacity']))}</figcaption></figure>"
    else:
        blocks += [f"<h2>{_CAPACITY_TITLE}</h2>", f"<p>{_inline(capacity(None))}</p>"]
    blocks += ["<h2>Method</h2>", *(f"<p>{_inline(text)}</p>" for text in _METHOD)]
    blocks += ["<h2>Conditions</h2>", f"<p>{_inline(conditions(results))}</p>"]
    raw = json.dumps(results, allow_nan=False).replace("</", "<\\/")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(TITLE)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>\n'
        + "\n".join(blocks)
        + f'\n<script type="application/json" id="results">{raw}</script>\n</body></html>\n'
    )


def quadratic_table(results: Results) -> Table:
    """Claims of a square, with every figure that decides."""
    heading = (
        "seconds(n) = a + bn + cn²",
        "a, ms",
        "b, µs",
        "c, ns (95 %)",
        "n* = b/c (95 %)",
        "longest",
        "BIC: line less square",
        "BIC: square less cube",
        "cubic term",
        "longest foretold",
        "verdict",
    )
    rows = [heading]
    for series, name in _QUADRATIC.items():
        each = results[series]
        rows.append(
            (
                name,
                f"{1e3 * each['a']:.3g}",
                f"{1e6 * each['b']:.3g}",
                f"{1e9 * each['c']:.3g} ({1e9 * each['c_low']:.3g}…{1e9 * each['c_high']:.3g})",
                f"{_length(each['n_star'])} ({_length(each['n_star_low'])}…{_length(each['n_star_high'])})",
                f"{each['longest']:,.0f}" + ("" if each["reach"] is None else f" = {each['reach']:.1f} n*"),
                f"{each['bic_linear'] - each['bic_quadratic']:+.0f}",
                f"{each['bic_quadratic'] - each['bic_cubic']:+.0f}",
                f"{each['next_share']:.1%}",
                f"{each['leave_longest_out_error']:.1%} off",
                "holds" if each["holds"] else "refused",
            )
        )
    return rows


def linear_table(results: Results) -> Table:
    """Claims of a line."""
    heading = (
        "seconds(n) = a + bn",
        "a, ms",
        "b, ns (95 %)",
        "a/b (95 %)",
        "longest",
        "BIC: constant less line",
        "BIC: line less square",
        "quadratic term",
        "longest foretold",
        "verdict",
    )
    rows = [heading]
    for series, name in _LINEAR.items():
        each = results[series]
        between = f"({_length(each['crossover_low'])}…{_length(each['crossover_high'])})"
        rows.append(
            (
                name,
                f"{1e3 * each['a']:.3g}",
                f"{1e9 * each['slope']:.3g} ({1e9 * each['slope_low']:.3g}…{1e9 * each['slope_high']:.3g})",
                f"{_length(each['crossover'])} {between}",
                f"{each['longest']:,.0f}",
                f"{each['bic_constant'] - each['bic_linear']:+.0f}",
                f"{each['bic_linear'] - each['bic_quadratic']:+.0f}",
                f"{each['next_share']:.1%}",
                f"{each['leave_longest_out_error']:.1%} off",
                "holds" if each["holds"] else "refused",
            )
        )
    return rows


def capacity(found: Results | None) -> str:
    """The capacity curve in words: what was offered, what came of it."""
    if found is None:
        return _NO_CAPACITY
    said = []
    for each in found["loads"]:
        p99 = "" if each["p99_ttft_ms"] is None else f", p99 to the first token {each['p99_ttft_ms']:,.0f} ms"
        said.append(
            f"at {each['load']:g} of it {each['offered']} requests were offered, {each['finished']} finished, "
            f"{each['refused']} refused, {each['failed']} failed, {each['cancelled']} cancelled{p99}"
        )
    return (
        f"`{found['model_id']}`, throughput and 99th percentiles against offered load: {found['capacity']:.2f} "
        f"requests/s with {found['users']} users who each wait for their answer; then by a schedule "
        f"({found['pattern']}, {found['seconds']:g} s each), {'; '.join(said)}. Latencies count from when a request "
        "was due."
    )


def conditions(results: Results) -> str:
    """What was measured on what, and how to measure it again."""
    settings, machine = results["settings"], results["machine"]
    packages = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    share = results["facts"]["others_share"]
    others = "Nobody knows what else ran" if share is None else f"Other processes took {share:.1%} of the machine"
    doubt = ": **these figures are doubtful**" if share is not None and share > NOISY else ""
    return (
        f"{settings['num_lengths']} lengths a series, {settings['repeats']} samples of each, {settings['threads']} "
        f"threads, chunks of {settings['chunk']} tokens; {results['seconds']:.0f} s in all. Measured {results['date']} "
        f"on {machine['processor']}, {machine['cores']} processors, fp32; {packages}. {others}{doubt}. "
        f"`make scaling` measures it anew; every raw sample is in `{RESULTS}` under `series`, as pairs of a length and "
        "seconds (memory: bytes)."
    )


def _verdict(results: Results) -> str:
    prefill, decode = results["prefill"], results["decode"]
    if results["quick"]:
        return "A quick run, to see that it works: too few samples of too short texts for any verdict."
    if not results["law_holds"]:
        return "**The law is refused** on this machine, as the service is now."
    return (
        f"**The law holds.** Prefill takes a + bn + cn² with c = {1e9 * prefill['c']:.3g} ns "
        f"({1e9 * prefill['c_low']:.3g}…{1e9 * prefill['c_high']:.3g}) and n* = {_length(prefill['n_star'])} tokens: "
        "beyond that, attention costs more than what each token costs by itself. A token with the cache is linear in "
        f"its context, {1e9 * decode['slope']:.3g} ns for each token of it; without the cache it is quadratic."
    )


def _problems(results: Results) -> list[str]:
    """What speaks against the law, as one Markdown list; empty where nothing does or nothing is decided."""
    problems = [] if results["quick"] else [*results["objections"], *results["drift"]["objections"]]
    return ["\n".join(f"- {problem}" for problem in problems)] if problems else []


def _controls(results: Results) -> str:
    controls, drift = results["controls"], results["drift"]
    said = [
        _said(controls["linear_rejects_quadratic"], "in made-up linear times no square is found"),
        _said(controls["quadratic_accepted"], "a made-up square is found"),
        _said(
            controls["gru_rejects_quadratic"], "in a recurrent model of equal size, in the same runtime, none is found"
        ),
    ]
    text = "Controls, by the same procedure: " + "; ".join(said) + ". "
    text += f"The recurrent model: {'; '.join(controls['gru']['objections']) or 'no objection'}. "
    if drift["compared"] is None:
        return text + f"Not compared with a baseline: {drift['reason']}."
    ratios = ", ".join(
        f"{name} {'-' if ratio is None else f'{ratio:.2f}'}" for name, ratio in drift["compared"].items()
    )
    return text + f"Over the baseline's: {ratios}."


def _said(is_so: bool, claim: str) -> str:  # noqa: FBT001 (a verdict, not a switch)
    return claim if is_so else f"**not so: {claim}**"


def _length(value: float | None) -> str:
    """A crossover; None is one that is never reached."""
    return "∞" if value is None else f"{value:,.0f}"


def _markdown(table: Table) -> str:
    heading, *rows = table
    rules = ["---", *["---:"] * (len(heading) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heading, rules, *rows))


def _html(table: Table) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    heading, *rows = table
    return (
        f"<table><thead>{row(heading, 'th')}</thead><tbody>{''.join(row(each, 'td') for each in rows)}</tbody></table>"
    )


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


def main(arguments: Sequence[str]) -> int:
    """Writes the report of results that were measured before."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.report", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("results", nargs="?", type=Path, default=BUILD / RESULTS, metavar="RESULTS")
    parser.add_argument("--out", type=Path, default=BUILD, metavar="DIR", help="where the page goes")
    parser.add_argument("--docs", action="store_true", help=f"write the document into {DOCS}/ besides")
    options = parser.parse_args(arguments)
    results = json.loads(options.results.read_text(encoding="utf-8"))
    write(results, options.out)
    if options.docs:
        write_document(results, DOCS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
