"""The results as a document: what was promised and what it came to, then the figures. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.results import RESULTS, by_part, passed
from loadtest.tables import Table, to_markdown

DOCUMENT = "gpu-check.md"
_MAX_REASON = 300

Part = Mapping[str, Any]
Values = dict[str, Any]


def render(stages: Mapping[str, Values], missing: Sequence[str] = ()) -> str:
    """The document, in Markdown; `missing` are stages that there could be besides."""
    parts = by_part(stages)
    lines = ["# GPU check", "", *_head(stages), ""]
    lines += ["## Promises", "", *_promises(parts, missing), ""]
    for name, part in parts.items():
        if part["figures"] and name in _SECTIONS:
            lines += [f"## {_TITLES[name]}", "", *_SECTIONS[name](part["figures"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _head(stages: Mapping[str, Part]) -> Iterator[str]:
    yield f"`python -m benchmarks.gpu_check`, [data]({RESULTS}). Every stage with the machine and the day of its run:"
    yield ""
    known = dict.fromkeys(each["machine"] for each in stages.values())
    machines = {machine: str(number) for number, machine in enumerate(known, 1)}
    rows = [["stage", "machine", "started", "seconds", "verdict"]]
    for name, stage in stages.items():
        verdict = "passed" if passed(stage) else "**not passed**"
        rows.append([name, machines[stage["machine"]], stage["started"], f"{stage['seconds']:.0f}", verdict])
    yield to_markdown(rows)
    yield ""
    yield "; ".join(f"{index}: {machine}" for machine, index in machines.items()) + "."
    yield ""
    versions = dict(item for stage in stages.values() for item in stage["versions"].items())
    yield ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
    if any(stage["is_quick"] for stage in stages.values()):
        yield ""
        yield "**A quick run, to see that everything works: its figures say nothing.**"


def _promises(parts: Mapping[str, Part], missing: Sequence[str]) -> Iterator[str]:
    rows = [["promise", "came to", "holds"]]
    for part in parts.values():
        rows += [[claim["text"], claim["found"], "yes" if claim["holds"] else "**no**"] for claim in part["claims"]]
    if len(rows) > 1:
        yield to_markdown(rows)
        yield ""
    for part in parts.values():
        for each in part["left_out"]:
            where = each["stage"] + ("" if each["what"] == each["stage"] else f", {each['what']}")
            yield f"- **not run**: {where}: {_one_line(each['why'])}"
        for stage, found in part["stages"].items():
            if not found["is_complete"] and not found["left_out"]:
                yield f"- **broken off**: {stage}"
    if missing:
        yield f"- **not run yet**: {', '.join(missing)}"


def _ceilings(figures: Mapping[str, Any]) -> Iterator[str]:
    rows = [["", "measured"]]
    rows += [[name, f"{rate / 1e9:.0f} GB/s"] for name, rate in figures.get("bytes_per_second", {}).items()]
    for precision, rates in figures.get("flops_per_second", {}).items():
        rows += [[f"{precision} product, side {side}", f"{rate / 1e12:.1f} TFLOP/s"] for side, rate in rates.items()]
    yield to_markdown(rows)


def _parity(figures: Mapping[str, Any]) -> Iterator[str]:
    rows = [["model", "precision", "largest error / spread", "equal arg-maxima", "greedy agreement", "beyond ties"]]
    rows[0].append("PyTorch's own")
    greedy = {(each["model"], each["precision"]): each for each in figures.get("greedy", [])}
    for golden in figures.get("golden", []):
        error, choices = golden["max_relative_error"], greedy.get((golden["model"], golden["precision"]))
        row = [golden["model"], golden["precision"], "no number" if error is None else f"{error:.2g}"]
        row.append(f"{golden['min_agreement']:.1%}")
        if choices is None:
            rows.append([*row, "-", "-", "-"])
            continue
        agreement = f"{choices['agreement']:.2%} of {choices['num_tokens']}"
        rows.append([*row, agreement, str(choices["num_wrong"]), f"{choices['by_torch']['agreement']:.2%}"])
    yield to_markdown(rows)
    yield ""
    yield (
        "Agreement with float32's choices after the same tokens; PyTorch's own: in the same precision, on the same "
        "card. 99 % and 2e-2 of the spread are promised of fp16. bf16 has seven bits of fraction instead of ten: it is "
        "held to eight times as much of the spread, and its agreement to PyTorch's own where that is below 99 %."
    )


def _captured(figures: Mapping[str, Any]) -> Iterator[str]:
    rows = [["model", "precision", "steps that differ", "rows, lengths", "eager step", "captured step"]]
    rows += [
        [
            each["model"],
            each["precision"],
            f"{len(each['different_steps'])} of {each['num_steps']}",
            "; ".join(f"{number}, {length}" for number, length in each["sizes"]),
            _milliseconds(each["eager_step_seconds"]),
            _milliseconds(each["captured_step_seconds"]),
        ]
        for each in figures.get("steps", [])
    ]
    yield to_markdown(rows)


def _batches(figures: Mapping[str, Any]) -> Iterator[str]:
    rows = [["model", "precision", "batch", "requests", "the same", "ties", "preemptions", "tokens at hand"]]
    names = ("model", "precision", "kind", "requests", "same", "ties", "preemptions", "cached_tokens")
    rows += [[str(each[name]) for name in names] for each in figures.get("batches", [])]
    yield to_markdown(rows)


def _speed(figures: Mapping[str, Any]) -> Iterator[str]:
    rows: Sequence[Mapping[str, Any]] = figures.get("rows", [])
    for model, metric in dict.fromkeys((row["model"], row["metric"]) for row in rows):
        here = [row for row in rows if (row["model"], row["metric"]) == (model, metric)]
        precision = here[0]["precision"]
        yield f"**{model}, {precision}, {metric}**: tokens a second, in brackets the share of the roofline."
        yield ""
        yield to_markdown(_rates(here))
        yield ""
        if steps := [row for row in here if row["graph_seconds"] is not None]:
            told = ", ".join(
                f"batch {row['size']} {_milliseconds(row['graph_seconds'])} in the graph"
                + ("" if row["host_seconds"] is None else f" and {_milliseconds(row['host_seconds'])} beside it")
                for row in steps
            )
            yield f"A step of ours, medians: {told}."
            yield ""


def _rates(rows: Sequence[Mapping[str, Any]]) -> Table:
    sizes = sorted({row["size"] for row in rows})
    by_place = {(row["system"], row["size"]): row for row in rows}
    table = [["", *(f"{size:,}" for size in sizes)]]
    for system in dict.fromkeys(row["system"] for row in rows):
        cells = [by_place.get((system, size)) for size in sizes]
        table.append([system, *map(_rate, cells)])
    roofs = {row["size"]: row["roofline"] for row in rows}
    return [*table, ["*the roofline*", *(f"{roofs[size]:,.0f}" for size in sizes)]]


def _rate(row: Mapping[str, Any] | None) -> str:
    return "-" if row is None else f"{row['tokens_per_second']:,.0f} ({row['share']:.2f})"


def _law(figures: Mapping[str, Any]) -> Iterator[str]:
    rows = [["model", "a, s", "b, s/token", "c, s/token²", "crossover", "quadratic share", "misfit", "objections"]]
    for fit in figures.get("fits", []):
        a, b, c = fit["coefficients"]
        rows.append(
            [
                fit["model"],
                *(f"{value:.3g}" for value in (a, b, c)),
                "never" if fit["crossover"] is None else f"{fit['crossover']:,.0f}",
                f"{fit['leading_share']:.0%}",
                f"{fit['misfit']:.1%}",
                "; ".join(fit["objections"]) or "none",
            ]
        )
    yield to_markdown(rows)


def _translation(figures: Mapping[str, Any]) -> Iterator[str]:
    if (training := figures.get("training")) is None:
        return
    cut = ", ended by the time there was" if training["is_cut"] else ""
    yield (
        f"{training['num_parameters']:,} parameters, {training['num_pairs']:,} pairs, step {training['step']:,} of "
        f"{training['steps']:,}{cut}; {training['seconds']:.0f} s with reading and scoring."
    )
    if "served" not in figures:
        return
    yield ""
    rows = [["", "BLEU", "chrF"]]
    by_torch, served = figures["pytorch"], figures["served"]
    rows.append(["PyTorch, fp32", f"{by_torch['bleu']:.2f}", f"{by_torch['chrf']:.2f}"])
    rows.append([f"served, {served['precision']}", f"{served['bleu']:.2f}", f"{served['chrf']:.2f}"])
    yield to_markdown(rows)
    yield ""
    yield (
        f"{served['same_as_pytorch']} of {figures['num_pairs']} translations are the same; "
        f"`{served['bleu_signature']}`, `{served['chrf_signature']}`."
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_REASON]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


_TITLES: Mapping[str, str] = {
    "ceilings": "What the device does at most",
    "parity": "Answers beside PyTorch's in float32",
    "captured": "Captured steps beside eager ones",
    "batches": "Answers in company beside answers alone",
    "speed": "Speed",
    "small": "Speed of the small model",
    "law": "Time against length: seconds = a + b·n + c·n²",
    "translation": "English to German",
}
_SECTIONS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "ceilings": _ceilings,
    "parity": _parity,
    "captured": _captured,
    "batches": _batches,
    "speed": _speed,
    "small": _speed,
    "law": _law,
    "translation": _translation,
}
