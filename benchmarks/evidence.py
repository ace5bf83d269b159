"""The evidence: the tables behind every figure of the README, each from one run of one command.

    python -m benchmarks evidence [NAME …]   measures these tables; default: those missing, or of older code
    python -m benchmarks evidence --list     each table: its commit, its day, how far the code has moved on
    python -m benchmarks evidence --write    each table's page, and the tables of README and docs/results/index.md
    python -m benchmarks evidence --check    exit status 1 if --write would change one of them
    python -m benchmarks evidence --fresh    exit status 1 if a table is missing, or of other code

Pages are made of the data, which stay as they were measured, but for the ratios of a bench: they are computed from its
rows and the losses in the data of `peers-loss`, so they change with these.

Measuring goes table by table, on committed code and an idle machine. What is done is on the disk, so that the same
command goes on after a break. Data lie in docs/results/data.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.frame.rounds import say
from benchmarks.frame.scenario import DOCS, Scenario, load
from benchmarks.frame.statistics import bootstrap
from benchmarks.frame.tables import replace, table, times
from benchmarks.scenarios._bench_losses import read_losses
from benchmarks.scenarios.bench import ratios_of
from loadtest import provenance
from loadtest.document import DATA
from loadtest.machine import describe, watch_others

FOLDER = DOCS / DATA
README, INDEX = Path("README.md"), DOCS / "index.md"
BEGIN, END = "<!-- evidence -->", "<!-- /evidence -->"
BUSY = 0.05
"""If other processes take more than this share of the machine, nothing is measured, or what was is no evidence."""
_LOOK_SECONDS = 5.0

Results = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """One run.

    Args:
        name: of its data, `docs/results/data/NAME.json`.
        command: after `python -m`; with `--docs` it writes its data itself, others print them on their last line.
        minutes: about so many.
    """

    name: str
    command: str
    minutes: int

    @property
    def code(self) -> list[str]:
        """What decides its figures, as git's pathspecs: not what only other tables run."""
        own = ["demo.py"]  # makes the models that others measure
        if self._scenario:
            path = Path(__file__).parent / "scenarios" / f"{self._scenario}.py"
            imported = _IMPORTED.findall(path.read_text(encoding="utf-8"))
            own += [f"scenarios/{name}.py" for name in (self._scenario, *imported)]
        shared = [path for path in provenance.MEASURED if path != "benchmarks"]
        parts = [*own, "frame", "infra", "models", "peers", "training"]
        others = [f":(exclude){path}" for path, kinds in _OPTIONAL.items() if self.kind not in kinds]
        return [*shared, *(f"benchmarks/{part}" for part in parts), *others]

    @property
    def kind(self) -> str:
        """The name up to its first hyphen."""
        return self.name.partition("-")[0]

    @property
    def scenario(self) -> Scenario[Any] | None:
        """What measures it, if one of the scenarios does."""
        return load(self._scenario) if self._scenario else None

    @property
    def _scenario(self) -> str:
        words = self.command.split()
        return words[2] if words[:2] == ["benchmarks", "run"] else ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A line of the results' table: what is claimed, and how its figure reads from a table's data.

    Of those with a rank the README shows the first few that were measured.
    """

    what: str
    table: str
    figure: Callable[[Results], str]
    rank: int = 0


_IN_README = 4
_LOSSES = "peers-loss"
_IMPORTED = re.compile(r"^from benchmarks\.scenarios(?:\.| import )(\w+)", re.MULTILINE)
_OPTIONAL: Mapping[str, Sequence[str]] = {
    "benchmarks/frame/limits.py": ("bench",),
    "benchmarks/frame/roofline.py": ("bench",),
    "benchmarks/frame/pictures.py": (),
    "benchmarks/frame/tables.py": (),
    "benchmarks/peers": ("bench", "peers", "translation"),
    "benchmarks/peers/openvino.py": ("bench", "peers"),
    "benchmarks/scenarios/_bench_losses.py": (),
    "benchmarks/scenarios/_bench_report.py": (),
    "service/transport/http": ("http",),
    "service/engine/sampling/grammar.py": ("structured",),
    "service/process/grammar_check.py": ("structured",),
    "service/repository/grammars.py": ("structured",),
    "loadtest/scaling": ("scaling",),
    "loadtest/provenance.py": (),
    "onward/pyproject.toml": (),
}
"""Code that decides figures of some kinds of table only, or of none, such as what makes pages of them."""
_QUALITY = "benchmarks run quality build/checkpoints/{0} --docs --name quality-{0}"
_FAITHFULNESS = "benchmarks run faithfulness build/checkpoints/{0} --docs --name faithfulness-{0}"
_BENCH = "benchmarks run bench --models {0} --precisions {1} --repeats 1 --new 64 --prompts 512,1024"
_BENCH_PARTS = {"whole": "fp32,bf16", "quantized": "int8,int4,int8-kv8,int4-kv8"}
_SLOWED = "; OpenVINO in int4 with float32 activations, which is not its fastest"
"""Of the run that is in docs/results; `benchmarks.peers.openvino` has had the faster setting since."""
_TRAINED = ("stdlib", "dates")
_COMPARED = ("llama-110m", "gpt2-124m")

TABLES = (
    # Makes the trained models that others measure.
    Table("demo", "benchmarks.demo", 5),
    *(Table(f"quality-{name}", _QUALITY.format(name), 3) for name in _TRAINED),
    *(Table(f"faithfulness-{name}", _FAITHFULNESS.format(name), 3) for name in _TRAINED),
    Table("interference", "benchmarks run interference --docs", 5),
    Table("prefix", "benchmarks run prefix --docs", 5),
    *(
        Table(f"http-{name}", f"benchmarks run http --model {name} --docs --name http-{name}", 2)
        for name in ("stdlib", "llama-110m")
    ),
    Table("structured", "benchmarks run structured --docs", 2),
    Table("structured-124m", "benchmarks run structured --checkpoint gpt2-124m --docs --name structured-124m", 4),
    Table("goodput", "benchmarks run goodput --docs", 11),
    Table("core_sharing", "benchmarks run core_sharing --docs", 7),
    Table("host", "benchmarks run host --docs", 3),
    Table("speculation", "benchmarks run speculation --docs", 2),
    Table("speculation-8", "benchmarks run speculation --in-flight 8 --prompts 8 --docs --name speculation-8", 2),
    Table("prediction", "benchmarks run prediction --docs", 10),
    Table("scaling", "loadtest scaling --docs", 11),
    Table("soak", "benchmarks run soak --docs", 26),
    Table("translation", "benchmarks run translation --docs", 35),
    Table("shapes", "benchmarks run shapes --docs", 50),
    # Before the bench, which reads it.
    Table(_LOSSES, f"benchmarks run loss benchmarks/models/llama-stdlib.toml --docs --name {_LOSSES}", 15),
    *(
        Table(name := f"bench-{model}-{part}", f"{_BENCH.format(model, precisions)} --docs --name {name}", 60)
        for model in _COMPARED
        for part, precisions in _BENCH_PARTS.items()
    ),
)


def _of(name: str, digits: int = 2) -> Callable[[Results], str]:
    return lambda results: f"{results[name]:.{digits}f}"


def _prefix(results: Results) -> str:
    shares = results["ways"]["sequential"]["ratio_by_repeat"]
    low, high = bootstrap(median, shares) or (min(shares), max(shares))
    slowest = results["ways"]["sequential"]["ratio"]["max"]
    concurrent = f"with 8 in flight {_concurrent(results):.0%} of a miss's"
    return f"{median(shares):.0%} ({low:.0%} to {high:.0%}), the slowest {slowest:.0%}; {concurrent}"


def _concurrent(results: Results) -> float:
    ways = results["ways"]
    return float(ways["concurrent"]["others_seconds"]["median"] / ways["unshared"]["others_seconds"]["median"])


def _interference(results: Results) -> str:
    rises = [1e3 * rise for rise in results["p99_rise_seconds_by_repeat"]]
    low, high = bootstrap(median, rises) or (min(rises), max(rises))
    chunk = 1e3 * results["chunk_seconds"]["costliest"]
    pooled = f"{1e3 * results['p99_rise_seconds']:.0f} over all rounds"
    return f"{median(rises):.0f} ms ({low:.0f} to {high:.0f}), {pooled}; the costliest chunk takes {chunk:.0f}"


def _http(results: Results) -> str:
    later, interval = results["first_token_later_seconds"], results["first_token_later_interval"]
    within = f"({1e3 * interval[0]:.1f} to {1e3 * interval[1]:.1f})"
    return f"{times(results['ratio'], results['ratio_interval'])}, {1e3 * later:.1f} ms {within}"


def _structured(results: Results) -> str:
    ratios = [
        times(ratio, results["ratio_intervals"][kind][form])
        for kind, forms in results["ratios"].items()
        for form, ratio in forms.items()
    ]
    return f"{', '.join(ratios)}; {results['steps_saved']:.0%}"


def _prediction(results: Results) -> str:
    parts = []
    for model, found in results["models"].items():
        alone, load = (found[when]["cost"]["share_within"] for when in ("alone", "load"))
        parts.append(f"{model} {alone:.0%}, {load:.0%}{' (not judged)' * (found['holds'] is None)}")
    return "; ".join(parts)


def _sharing(results: Results) -> str:
    parts = []
    for way in ("even", "favored"):
        each = results["ways"][way]
        low, high = min(each["share_by_round"]), max(each["share_by_round"])
        parts.append(f"{each['share']:.0%} ({low:.0%} to {high:.0%})")
    return ", ".join(parts)


def _host(results: Results) -> str:
    each = results["batches"]["8"]
    low, high = each["host_share_interval"]
    return f"{1e3 * each['host_seconds']:.2f} ms, {each['host_share']:.1%} ({low:.1%} to {high:.1%})"


def _kinds(form: str) -> Callable[[Results], str]:
    def figure(results: Results) -> str:
        reference, *rows = results["rows"]
        parts = [f"{row['precision']}{'-kv8' * (row['kv_precision'] == 'int8')} {row['value']:{form}}" for row in rows]
        return f"PyTorch {reference['value']:{form}}; {', '.join(parts)}"

    return figure


def _faithful(results: Results) -> str:
    equal = round(results["agreement"] * results["positions"])
    return f"{equal:,} of {results['positions']:,}; log-probabilities within {results['max_logprob_error']:.1e}"


def _speculation(results: Results) -> str:
    parts = []
    for task in ("continue", "copy", "sample"):
        ratios = results["tasks"][task]["ratios"]
        parts.append(times(median(ratios), bootstrap(median, ratios)))
    return ", ".join(parts)


def _translation(results: Results) -> str:
    return ", ".join(
        f"{name} {times(results['ratios'][name], results['intervals'].get(name))}" for name in ("fp32", "int8")
    )


def _shapes(results: Results) -> str:
    errors = [row["planned_bytes"] / row["peak_bytes"] - 1 for row in results["rows"]]
    names = ", ".join(dict.fromkeys(row["model"] for row in results["rows"]))
    return f"{min(errors):+.1%} to {max(errors):+.1%} ({names}; int8, int4)"


def _scaling(results: Results) -> str:
    prefill = results["prefill"]
    low, middle, high = (1e9 * prefill[name] for name in ("c_low", "c", "c_high"))
    least, star, most = (prefill[name] for name in ("n_star_low", "n_star", "n_star_high"))
    overtakes = f"more than all else from {star:.0f} tokens ({least:.0f} to {most:.0f})"
    return f"{middle:.1f} ns ({low:.1f} to {high:.1f}) n², {overtakes}"


def _compressed(results: Results) -> str:
    ours, alone, primed = (
        results[name] for name in ("stdlib_bits_per_byte", "xz_bits_per_byte", "xz_primed_bits_per_byte")
    )
    return f"{ours:.3f}; `xz` {alone:.3f}, primed {primed:.3f}"


def _soak(results: Results) -> str:
    clean, more = results["runs"]["as it is"], results["recovered"]
    low, high = clean["mb_per_hour_low"], clean["mb_per_hour_high"]
    put_in = results["settings"]["leak_mb_per_hour"]
    control = f"{more['mb_per_hour']:.1f} ({more['low']:.1f} to {more['high']:.1f}) of {put_in:g} put in"
    return f"{clean['mb_per_hour']:.1f} ({low:.1f} to {high:.1f}); the control finds {control}"


def _bench(results: Results) -> str:
    """Ours over the fastest peer at equal loss: decoding 1, 8, 32 rows, then prompts."""
    parts = []
    for place, ratio in results["ratios"].items():
        _, precision, metric, batch, prompt = place.split("/")
        if precision == "any" and ratio["onward"] is not None:
            what = f"{metric} {prompt if metric == 'prefill' else batch}"
            parts.append(f"{what} {times(ratio['onward'], ratio['interval'])}")
    return ", ".join(parts)


def _loss(results: Results) -> str:
    """What ours lose over PyTorch, and at each precision the peer that loses least."""
    rows = [row for row in results["rows"] if "excess" in row]
    parts = []
    for row in rows:
        if row["system"] == "onward":
            peers = [each for each in rows if each["system"] != "onward" and each["precision"] == row["precision"]]
            best = min(peers, key=lambda each: float(each["excess"]), default=None)
            beside = "" if best is None else f" ({best['system']} {best['excess']:+.2%})"
            parts.append(f"{row['precision']} {row['excess']:+.2%}{beside}")
    return ", ".join(parts)


CLAIMS = (
    Claim("held-out dates exact, over gRPC, after minutes of training", "demo", _of("dates_exact_match", 3)),
    Claim(
        "largest logit error of the float32 graphs against PyTorch",
        "demo",
        lambda r: f"{r['parity_max_abs_error']:.1e}",
    ),
    Claim("`stdlib` after minutes of training: bits per byte of all held-out modules", "demo", _compressed),
    Claim(
        "`stdlib`, bits per byte of 96 KiB of held-out modules, in fewer bits", "quality-stdlib", _kinds(".4f"), rank=4
    ),
    Claim("`dates`, share of 500 held-out dates exact", "quality-dates", _kinds(".4f")),
    Claim("`dates`: served greedy tokens that are the reference's", "faithfulness-dates", _faithful),
    Claim("`stdlib`: the same", "faithfulness-stdlib", _faithful),
    Claim("3,000 tokens amid eight streams: their 99th percentile rises by", "interference", _interference, rank=8),
    Claim("a shared prefix of 512 tokens: later first tokens, of the first's time", "prefix", _prefix, rank=5),
    *(
        Claim(f"32 streams of `{name}` over HTTP ÷ gRPC, and how much later a first token comes", f"http-{name}", _http)
        for name in ("stdlib", "llama-110m")
    ),
    *(
        Claim(
            f"8 streams of {model} with a JSON schema ÷ free text: greedy (integers, a text), sampled (the same); "
            "steps of one document that drafts save",
            table,
            _structured,
        )
        for model, table in (("`stdlib`", "structured"), ("`gpt2-124m`, random weights,", "structured-124m"))
    ),
    Claim(
        "answers in time at 1.5 times capacity: with admission over without",
        "goodput",
        lambda r: times(r["ratio"], r["ratio_interval"]),
        rank=3,
    ),
    Claim("two busy models, weights 1 : 1 and 3 : 1: the first one's share of the cores", "core_sharing", _sharing),
    Claim("host time of an int8 step at batch 8, and its share", "host", _host, rank=7),
    Claim("prompt look-up over none, one request: continuing, copying, sampling", "speculation", _speculation, rank=6),
    Claim("prompt look-up over none, 8 requests together: the same", "speculation-8", _speculation),
    Claim("predictions within 20 %: one request at a time, and under load", "prediction", _prediction),
    Claim("what attention costs in a prompt of n tokens", "scaling", _scaling),
    Claim("memory in MB an hour under load with cancels", "soak", _soak),
    Claim("translation for 32 users over CTranslate2's best batching", "translation", _translation, rank=2),
    Claim("random weights in true shapes: the memory plan beside the measured peak", "shapes", _shapes),
    Claim("bits per byte over PyTorch's, and beside it the peer that loses least", "peers-loss", _loss),
    *(
        Claim(
            f"`{model}` in {_BENCH_PARTS[part]} over the best peer at equal loss{_SLOWED * (part == 'quantized')}",
            f"bench-{model}-{part}",
            _bench,
        )
        for model in _COMPARED
        for part in _BENCH_PARTS
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks evidence", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of tables: {', '.join(each.name for each in TABLES)}"
    )
    for flag in ("list", "write", "check", "fresh"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {each.name for each in TABLES}:
        parser.error(f"there is no table {', '.join(sorted(unknown))}")
    if options.write or options.check:
        others = [path for each in TABLES for path in _renewed(made(each), is_written=options.write)]
        # Behind the tables' own data, which they are made of.
        pages = {page: written(_text(page), page) for page in (README, INDEX)}
        others += _renewed(pages, is_written=options.write)
        return _complain([f"{path} differs from what its data give: --write" for path in others if options.check])
    wanted = [each for each in TABLES if not options.names or each.name in options.names]
    states = {each: state(each, FOLDER) for each in wanted}
    if options.list or options.fresh:
        if options.fresh and provenance.is_changed():
            return _complain(["there are changes that are not committed: nothing was measured of them"])
        for each, said in states.items():
            print(f"{each.name:20} {said or 'of this code'}")
        return int(options.fresh and any(states.values()))
    return _measure([each for each in wanted if options.names or states[each]])


def read(name: str, folder: Path) -> Results | None:
    """A table's data.

    None where they are missing, of a trial or of another command, do not say of which code they are, or the machine was
    not idle.
    """
    try:
        results: Results = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    busy = results.get("others_share", results.get("facts", {}).get("others_share"))
    is_whole = not results.get("is_quick") and results.get("command") in _commands(name)
    is_evidence = is_whole and results.get("commit") and busy is not None and busy <= BUSY
    return results if is_evidence else None


def _commands(name: str) -> list[str]:
    return [f"python -m {each.command}" for each in TABLES if each.name == name]


def made(each: Table) -> dict[Path, str]:
    """A table's page and data, as the code makes them of what was measured; none if that is of other code."""
    results, scenario = read(each.name, FOLDER), each.scenario
    if results is None or scenario is None or state(each, FOLDER):
        return {}
    if each.kind == "bench" and read(_LOSSES, FOLDER) is not None:
        results = {**results, "ratios": ratios_of(results["rows"], read_losses(FOLDER / f"{_LOSSES}.json"))}
    # Pictures stay: some show what the data do not keep.
    undrawn = scenario if scenario.draw is None else dataclasses.replace(scenario, draw=lambda _: "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        undrawn.write(results, folder, each.name)
        texts = {path.relative_to(folder): _text(path) for path in folder.rglob("*.*")}
    return {DOCS / path: text for path, text in texts.items() if path.suffix != ".svg"}


def _renewed(texts: Mapping[Path, str], *, is_written: bool) -> list[Path]:
    """The files that have other texts; they are written if that is asked."""
    others = [path for path, text in texts.items() if _text(path) != text]
    for path in others if is_written else ():
        path.write_text(texts[path], encoding="utf-8")
    return others


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def state(each: Table, folder: Path) -> str:
    """Why a table should be measured; empty if it need not be."""
    results = read(each.name, folder)
    if results is None:
        return "not measured"
    count = provenance.commits_since(results["commit"], each.code)
    since = f"measured {results['date']} at {results['commit']}"
    if count is None:
        return f"{since}, which is not in this history"
    return f"{since}, {count} commits of measured code ago" if count else ""


def written(text: str, page: Path) -> str:
    """A page, README or index, with its claims whose tables were measured.

    Raises:
        ValueError: if it lacks the marks.
    """
    claims = sorted((each for each in CLAIMS if each.rank), key=lambda each: each.rank) if page == README else CLAIMS
    link = FOLDER.relative_to(page.parent)
    rows = []
    for claim in claims:
        if (results := read(claim.table, FOLDER)) is not None:
            command = results["command"].replace(" --docs", "")
            where = f"`{results['commit']}`, {results['date']}{', AMX' * results['machine']['amx']}"
            missed = ", its promise does **not** hold" * (results.get("passed") is False)
            figure = f"[{claim.figure(results)}]({link}/{claim.table}.json){missed}"
            rows.append((claim.what, figure, f"`{command}`", where))
    if page == README:
        del rows[_IN_README:]
    return replace(text, BEGIN, END, "\n".join(table("what|figure (95 % interval)|command|at", rows, text_columns=4)))


def _measure(wanted: Sequence[Table]) -> int:
    """One after the other; stops at the first that cannot be measured."""
    if provenance.is_changed():
        return _complain(["there are changes that are not committed: nobody could look up what was measured"])
    minutes = sum(each.minutes for each in wanted)
    for number, each in enumerate(wanted):
        say(f"{each.name}: table {number + 1} of {len(wanted)}, {minutes} minutes to go")
        minutes -= each.minutes
        if (busy := _busy()) > BUSY:
            return _complain([f"{each.name}: others take {busy:.0%} of the machine, nothing is measured"])
        if not _run(each):
            return _complain([f"{each.name}: not measured"])
    return 0


def _busy() -> float:
    share = watch_others()
    time.sleep(_LOOK_SECONDS)
    return share() or 0.0


def _run(each: Table) -> bool:
    """Whether a table was measured, by a command that wrote its data or printed them."""
    command = [sys.executable, "-m", *shlex.split(each.command)]
    code, others = provenance.here(), watch_others()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    busy = others()
    path = FOLDER / f"{each.name}.json"
    if "--docs" not in each.command and done.returncode == 0:
        facts = {"command": f"python -m {each.command}", **code, "machine": describe(), "others_share": busy}
        path.write_text(json.dumps(facts | json.loads(done.stdout.splitlines()[-1]), indent=1) + "\n", encoding="utf-8")
    results = read(each.name, FOLDER)
    # A promise that does not hold is a figure, too: the command ends with 1 and has written it.
    if results is None or results["commit"] != code["commit"]:
        return False
    say(f"{each.name}: measured, others took {busy or 0.0:.1%} of the machine")
    return True


def _complain(problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"evidence: {problem}", file=sys.stderr)
    return int(bool(problems))
