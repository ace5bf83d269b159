"""Options that the command line and Locust share.

Works with any parser that has argparse's `add_argument` and any object with the options as attributes: Locust's web
form gives text for numbers and "" for empty fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from loadtest.core.access import Access, Parser, add_access, read_access
from loadtest.core.arrivals import Arrivals, Pattern, read_trace
from loadtest.core.figures import METRICS, Wanted, parse_objectives
from loadtest.core.wire import Sampling
from loadtest.core.workload import Workload, parse_lengths

T = TypeVar("T")
_LENGTHS = "N, uniform:LEAST:MOST, geometric:MEAN or file:PATH"


def add_options(parser: Parser, *, rate: float, arrivals: str, **model: str) -> None:
    """Adds the options; the two defaults differ between commands, as do further settings of `--model`."""
    add = parser.add_argument
    add("--model", default="", help="model name; optional if the server has one model", **model)
    add("--prompt-tokens", default="128", help=f"tokens of a prompt: {_LENGTHS}")
    add("--max-tokens", default="64", help=f"tokens of an answer: {_LENGTHS} (of a file's lines the second number)")
    add("--prefix-tokens", type=int, default=0, help="length of the shared prefix")
    add("--prefix-share", type=float, default=1.0, help="share of the prompts with the prefix")
    add("--cancel-share", type=float, default=0.0, help="share of the requests that the client cancels")
    add("--cancel-after", type=float, default=1.0, help="seconds after which it cancels them")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--honour-eos", action="store_true", help="let answers end at end of sequence, not only at their length")
    add("--vocab-size", type=int, default=0, help="token ids are below this; 0 takes the server's value")
    add("--timeout", type=float, default=0.0, help="deadline of each request in seconds; 0 for none")
    add(
        "--drain",
        type=float,
        default=60.0,
        help="seconds to wait at the end for requests in flight before cancelling them",
    )
    add("--seed", type=int, default=0, help="equal seeds give equal requests at equal times")
    add(
        "--arrivals",
        default=arrivals,
        choices=["", *Pattern] if not arrivals else list(Pattern),
        help="open loop: distribution of the gaps between requests" + ("; empty: closed loop" if not arrivals else ""),
    )
    add("--request-rate", "--rate", dest="rate", type=float, default=rate, help="mean requests per second")
    add("--burstiness", type=float, default=1.0, help="shape of gamma: 1 is Poisson, less is burstier")
    add("--trace", default="", help="file of sending times in seconds, one a line")
    add("--num-prompts", "--requests", dest="requests", type=int, default=0, help="number of requests; 0 for no limit")
    add("--goodput", default="", nargs="*", help="objectives in ms for goodput: ttft:500 tpot:50 e2el:5000")
    add("--percentile-metrics", default=",".join(METRICS), help="metrics to report")
    add("--metric-percentiles", default="99", help="percentiles to report, as in 50,90,99.9")
    add_access(parser)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The validated options. `arrivals` is None in a closed loop, `requests` None if no count ends the run."""

    model: str
    make_workload: Callable[..., Workload]
    """Takes a `vocab_size` and a `stream`."""
    vocab_size: int
    sampling: Sampling
    timeout_seconds: float | None
    drain_seconds: float
    seed: int
    arrivals: Arrivals | None
    requests: int | None
    wanted: Wanted
    access: Access

    def workload(self, vocab_size: int, stream: int = 0, **changes: Any) -> Workload:
        """The requests for a vocabulary; different streams have different prompts.

        Raises:
            ValueError: naming every field that does not fit.
        """
        return self.make_workload(vocab_size=self.vocab_size or vocab_size, stream=stream, **changes)


def read_options(values: Any) -> LoadOptions:
    """Validates the options of a parsed command line or of a web form.

    Raises:
        ValueError: naming every option that does not fit.
    """
    problems: list[str] = []

    def read(name: str, convert: Callable[[str], T], default: T, *, fits: Callable[[T], bool] = lambda _: True) -> T:
        text = str(getattr(values, name)).strip()
        try:
            value = convert(text) if text else default
        except (ValueError, OSError) as error:
            # Some messages already begin with the option.
            message = str(error)
            problems.append(message if message.startswith("--") else f"{_flag(name)}: {message}")
            return default
        if not fits(value):
            problems.append(f"{_flag(name)}: {text} is out of range")
            return default
        return value

    def not_negative(value: float) -> bool:
        return math.isfinite(value) and value >= 0.0

    def is_share(value: float) -> bool:
        return 0.0 <= value <= 1.0

    one, access = parse_lengths("1", ""), Access()
    try:
        access = read_access(values)
    except ValueError as error:
        problems.append(str(error))
    requests, seed = read("requests", int, 0, fits=not_negative), read("seed", int, 0)
    options = LoadOptions(
        model=read("model", str, ""),
        make_workload=partial(
            Workload,
            prompt_tokens=read("prompt_tokens", lambda text: parse_lengths(text, "--prompt-tokens"), one),
            max_tokens=read("max_tokens", lambda text: parse_lengths(text, "--max-tokens", column=1), one),
            prefix_tokens=read("prefix_tokens", int, 0, fits=not_negative),
            prefix_share=read("prefix_share", float, 1.0, fits=is_share),
            cancel_share=read("cancel_share", float, 0.0, fits=is_share),
            cancel_after_seconds=read("cancel_after", float, 1.0, fits=lambda value: value > 0.0),
            seed=seed,
        ),
        vocab_size=read("vocab_size", int, 0, fits=not_negative),
        sampling=Sampling(
            temperature=read("temperature", float, 0.0, fits=not_negative),
            ignore_eos=not read("honour_eos", _truth, default=False),
        ),
        timeout_seconds=read("timeout", float, 0.0, fits=not_negative) or None,
        drain_seconds=read("drain", float, 60.0, fits=not_negative),
        seed=seed,
        arrivals=_arrivals(read, problems),
        requests=requests or None,
        wanted=Wanted(
            metrics=read("percentile_metrics", _metrics, METRICS),
            percentiles=read("metric_percentiles", _percentiles, (99.0,)),
            objectives=_objectives(values, problems),
        ),
        access=access,
    )
    if problems:
        raise ValueError("; ".join(problems))
    return options


def _arrivals(read: Callable[..., Any], problems: list[str]) -> Arrivals | None:
    """The schedule; None without `--arrivals` and at an infinite rate."""
    pattern = read("arrivals", lambda text: Pattern(text) if text else None, None)
    rate = read("rate", float, 0.0)
    if pattern is None or (pattern is not Pattern.TRACE and rate == math.inf):
        return None
    trace = read("trace", lambda text: read_trace(Path(text)), ())
    try:
        return Arrivals(
            pattern=pattern,
            # The default rate is for the other patterns.
            rate=0.0 if pattern is Pattern.TRACE else rate,
            burstiness=read("burstiness", float, 1.0),
            trace=trace,
            seed=read("seed", int, 0),
        )
    except ValueError as error:
        problems += [f"--{each}" for each in str(error).split("; ")]
        return None


def _flag(name: str) -> str:
    return "--" + {"rate": "request_rate", "requests": "num_prompts"}.get(name, name).replace("_", "-")


def _truth(text: str) -> bool:
    return text.lower() == "true"


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in METRICS]:
        raise ValueError(f"no metric {unknown[0]!r}, only {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    values = tuple(float(each) for each in text.split(","))
    if outside := [value for value in values if not 0.0 <= value <= 100.0]:
        raise ValueError(f"{outside[0]:g} is not from 0 to 100")
    return values


def _objectives(values: Any, problems: list[str]) -> dict[str, float]:
    given = values.goodput
    try:
        return parse_objectives(given.split() if isinstance(given, str) else given)
    except ValueError as error:
        problems.append(str(error))
        return {}
