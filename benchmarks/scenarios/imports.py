"""Which checkpoints import, and how close they come to transformers.

Every case is a configuration of one of transformers' classes with random weights, saved by transformers, imported,
exported and run by the engine. Transformers is the reference:

    torch     logits of the imported checkpoint
    graph     logits of the exported graph over golden schedules: whole prompts, chunks, ragged rows, single tokens
    greedy    64 tokens of the engine beside `generate`, ties aside
    beams     for encoder-decoders, hypotheses of the engine's beam search beside `generate`'s

Weights are drawn so that logits spread like a trained model's; with transformers' own initialization they would be
nearly equal. The last case, `gpt2-124m`, is about resources: seconds and peak memory of import, export and start at a
real size (`_import_large`). Needs transformers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.frame.engine import checked_step
from benchmarks.frame.rounds import say
from benchmarks.frame.scenario import Results, Run, Scenario, option
from benchmarks.frame.tables import table
from benchmarks.scenarios._import_cases import CASES, NUM_BEAMS, Case, make_folder
from export.exporter import export
from export.replay import Replayer
from loadtest.child import run_module
from model import checkpoint
from model.hf.importer import plan, write
from model.nn import reference
from model.spec import artifact, golden
from model.spec.artifact import TOKENIZER, Device, Precision
from model.spec.golden import Float32, GoldenCase
from model.spec.tokenizer import Tokenizer
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_engine
from service.engine.scheduler import EngineLimits
from service.engine.sessions.session import SessionOptions
from service.engine.types import BeamSearchParams, GenerationRequest, SamplingParams, StoppingParams

TOLERANCE = 1e-4
"""Of a logit, absolute."""
TIE = 1e-3
"""Logits closer than this may come in either order."""
GREEDY_TOKENS = 64
BEAM_TOKENS = 18
LARGE = "gpt2-124m"
NUM_SOURCES = 50

_SPREADS = 0.5, 50.0
_MIN_DISTINCT = 8
_MIN_LENGTHS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How close a case came. `spread` is the standard deviation of transformers' logits, the scale of errors.

    Of `num_greedy` continuations and `num_beams` searches all are equal or part at a tie.
    """

    case: Case
    torch_error: float
    graph_error: float
    spread: float
    num_greedy: int
    num_greedy_ties: int
    num_beams: int
    num_beam_ties: int
    problems: tuple[str, ...]


def check(case: Case, workshop: Path, num_sources: int = NUM_SOURCES) -> Outcome:
    """Makes, imports, exports and runs one case."""
    theirs = make_folder(case, workshop / "theirs")
    write(plan(workshop / "theirs"), workshop / "ours")
    loaded = checkpoint.load(workshop / "ours")
    exported = workshop / "artifact"
    export(loaded, exported, Device.CPU, Precision.FP32, lambda _: None)
    problems: list[str] = []
    cases = tuple(_answer(theirs, each) for each in golden.load(exported / artifact.GOLDEN))
    spread = float(np.concatenate([each.logits for each in cases]).std())
    torch_error = _torch_error(theirs, loaded)
    graph_error = _graph_error(exported, cases)
    for name, error in (("torch", torch_error), ("graph", graph_error)):
        if not error < TOLERANCE:
            problems.append(f"{name} is off by {error:.1e}")
    if not _SPREADS[0] < spread < _SPREADS[1]:
        problems.append(f"logits spread {spread:.2g}: no measure")
    engine = _Engine(exported)
    greedy = _Tally()
    for prompt in _prompts(loaded.config, 4):
        greedy.add(*_compare_greedy(theirs, engine, prompt))
    beams = _Tally()
    if loaded.config.is_encoder_decoder:
        sources = list(_prompts(loaded.config, num_sources))
        for index, (their_words, our_words) in enumerate(_SETTINGS):
            for comparison in _compare_beams(theirs, engine, sources[index :: len(_SETTINGS)], their_words, our_words):
                beams.add(*comparison)
    if not loaded.config.is_encoder_decoder or num_sources >= NUM_SOURCES:
        problems += _too_uniform([*greedy.outputs, *beams.outputs])
    problems += [f"greedy: {problem}" for problem in greedy.problems] + [f"beams: {each}" for each in beams.problems]
    return Outcome(
        case=case,
        torch_error=torch_error,
        graph_error=graph_error,
        spread=spread,
        num_greedy=greedy.num_equal + greedy.num_ties,
        num_greedy_ties=greedy.num_ties,
        num_beams=beams.num_equal + beams.num_ties,
        num_beam_ties=beams.num_ties,
        problems=tuple(problems),
    )


@dataclass(slots=True)
class _Tally:
    """Comparisons: equal, parted at a tie, or wrong; and the expected outputs."""

    num_equal: int = 0
    num_ties: int = 0
    outputs: set[tuple[int, ...]] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def add(self, wanted: Sequence[int], gap: float | None, what: str) -> None:
        """Counts one; `gap` is the difference where they part, None where they do not."""
        self.outputs.add(tuple(wanted))
        if gap is None:
            self.num_equal += 1
        elif gap < TIE:
            self.num_ties += 1
        else:
            self.problems.append(what)


def _logits(theirs: Any, sequence: Sequence[int], source: Sequence[int] | None) -> Float32:
    """Transformers' logits after each token of a sequence, without a cache."""
    ids = torch.tensor([list(sequence)])
    with torch.no_grad():
        if source is None:
            out = theirs(input_ids=ids, use_cache=False)
        else:
            out = theirs(input_ids=torch.tensor([list(source)]), decoder_input_ids=ids, use_cache=False)
    logits: Float32 = out.logits[0].float().numpy()
    return logits


def _torch_error(theirs: Any, loaded: checkpoint.Checkpoint) -> float:
    """The largest over three lengths, the whole context among them."""
    config, errors = loaded.config, []
    rng = np.random.default_rng(3)
    for length in (1, 17, config.context):
        sequence = rng.integers(0, config.vocab_size, length).tolist()
        source = None
        if config.is_encoder_decoder:
            source = rng.integers(0, config.source_vocab_size, max(1, config.source_context - length + 1)).tolist()
        ours = reference.logits(loaded.model, sequence, source).numpy()
        errors.append(float(np.abs(ours - _logits(theirs, sequence, source)).max()))
    return max(errors)


def _answer(theirs: Any, case: GoldenCase) -> GoldenCase:
    """A golden case with transformers' answers in place of ours."""
    known: dict[int, Float32] = {}
    rows = []
    for step in case.steps:
        for feed in step:
            if feed.row not in known:
                source = case.sources[feed.row].tolist() if case.sources else None
                known[feed.row] = _logits(theirs, case.sequences[feed.row].tolist(), source)
            rows.append(known[feed.row][feed.start + feed.count - 1])
    return dataclasses.replace(case, logits=np.stack(rows))


def _graph_error(folder: Path, cases: Iterable[GoldenCase]) -> float:
    replayer = Replayer.open(folder, artifact.load(folder))
    return max(float(np.abs(replayer.run(case) - case.logits).max()) for case in cases)


class _Engine:
    """An artifact's engine, one request at a time."""

    def __init__(self, folder: Path) -> None:
        manifest = artifact.load(folder)
        tokenizer = Tokenizer.load(folder / TOKENIZER)
        limits = EngineLimits(max_batch_size=NUM_BEAMS, prefill_chunk=16, max_prefill_tokens=16)
        options = SessionOptions(intra_op_threads=1, allow_spinning=False)
        self._engine: Engine = build_engine(folder, manifest, tokenizer.decode, limits, options, LastRun())

    def run(
        self, prompt: Sequence[int], max_tokens: int, beams: BeamSearchParams | None = None
    ) -> tuple[list[int], float | None]:
        """The tokens of the best output, and its score."""
        self._engine.add_request(
            GenerationRequest(
                request_id="r",
                model="",
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(temperature=0.0),
                stopping=StoppingParams(max_tokens=max_tokens),
                beam_search=beams,
            )
        )
        tokens: list[int] = []
        score = None
        while self._engine.has_work:
            for event in checked_step(self._engine).events:
                tokens += [] if event.token_id is None else [event.token_id]
                score = event.score if event.score is not None else score
        return tokens, score


def _prompts(config: Any, count: int) -> Iterator[list[int]]:
    """Prompts or sources of several lengths."""
    rng = np.random.default_rng(11)
    size = config.source_vocab_size or config.vocab_size
    for index in range(count):
        yield rng.integers(3, size, 2 + (index * 7) % 23).tolist()


def _generate(
    theirs: Any, prompts: Sequence[Sequence[int]], max_tokens: int, **settings: Any
) -> list[tuple[list[int], float | None]]:
    """What `generate` adds to prompts of one length, or makes of sources of any, up to each end; and scores."""
    width = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
    mask = torch.tensor([[1] * len(prompt) + [0] * (width - len(prompt)) for prompt in prompts])
    out = theirs.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max_tokens,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    given = 1 if theirs.config.is_encoder_decoder else width
    scores = getattr(out, "sequences_scores", None)
    found = [_until(tokens, theirs.generation_config.eos_token_id) for tokens in out.sequences[:, given:].tolist()]
    return list(zip(found, [None] * len(found) if scores is None else scores.tolist(), strict=True))


def _until(tokens: list[int], ends: int | list[int]) -> list[int]:
    """The tokens up to the first end; `generate` pads behind it."""
    wanted = ends if isinstance(ends, list) else [ends]
    first = next((place for place, token in enumerate(tokens) if token in wanted), len(tokens))
    return tokens[: first + 1]


def _too_uniform(outputs: Sequence[Sequence[int]]) -> list[str]:
    """Why equal outputs would show little: few words, few different ones, or all equally long."""
    num_words, num_outputs = len(set().union(*outputs)), len({tuple(output) for output in outputs})
    problems = [f"outputs of {num_words} words: no measure"] if num_words < _MIN_DISTINCT else []
    if num_outputs < min(len(outputs), _MIN_DISTINCT):
        problems.append(f"{num_outputs} different outputs: no measure")
    if len(outputs) >= NUM_SOURCES and len(set(map(len, outputs))) < _MIN_LENGTHS:
        problems.append("outputs all but equally long: no measure")
    return problems


Comparison = tuple[list[int], float | None, str]
"""Transformers' output; the gap where ours parts from it, or None; and both in words."""


def _compare_greedy(theirs: Any, engine: _Engine, prompt: list[int]) -> Comparison:
    """The gap is between the logits of the first different tokens."""
    ((wanted, _),) = _generate(theirs, [prompt], GREEDY_TOKENS, num_beams=1)
    found, _ = engine.run(prompt, GREEDY_TOKENS)
    if found == wanted:
        return wanted, None, ""
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), None)
    if at is None:
        return wanted, float("inf"), f"{len(found)} tokens of {len(wanted)} for {prompt}"
    if theirs.config.is_encoder_decoder:
        start = theirs.generation_config.decoder_start_token_id
        row = _logits(theirs, [start, *wanted[:at]], prompt)[-1]
    else:
        row = _logits(theirs, [*prompt, *wanted[:at]], None)[-1]
    gap = float(abs(row[found[at]] - row[wanted[at]]))
    return wanted, gap, f"token {at} is {found[at]}, must be {wanted[at]} for {prompt}, {gap:.1e} apart"


_SETTINGS: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = (
    ({}, {"patience": None}),
    ({"length_penalty": 1.0, "early_stopping": True}, {"length_penalty": 1.0, "patience": 1.0}),
    ({"length_penalty": 2.0, "early_stopping": "never"}, {"length_penalty": 2.0, "patience": 1000.0}),
    ({"length_penalty": 0.6, "early_stopping": True, "no_repeat_ngram_size": 3},
     {"length_penalty": 0.6, "patience": 1.0, "no_repeat_ngram_size": 3}),
)  # fmt: skip
"""The same search in their parameters and in ours; the first is the model's default."""


def _compare_beams(
    theirs: Any,
    engine: _Engine,
    sources: Sequence[list[int]],
    their_words: Mapping[str, Any],
    our_words: Mapping[str, Any],
) -> Iterator[Comparison]:
    """The gap is between the scores of the hypotheses; equal hypotheses must have equal scores."""
    answers = _generate(theirs, sources, BEAM_TOKENS, num_beams=NUM_BEAMS, **their_words)
    for source, (wanted, wanted_score) in zip(sources, answers, strict=True):
        found, score = engine.run(source, BEAM_TOKENS, BeamSearchParams(beam_size=NUM_BEAMS, **our_words))
        gap = abs((score or 0.0) - (wanted_score or 0.0))
        said = f"{found} ({score:.4f}), must be {wanted} ({wanted_score:.4f}) with {dict(their_words)}"
        if found == wanted:
            yield wanted, None if gap < TIE else float("inf"), said
        else:
            yield wanted, gap, said


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSettings:
    """Which cases."""

    only: tuple[str, ...] = option((), "cases or families; none: all", quick=("gpt2-tied",), spaced=True)
    rounds: int = option(1, f"of {LARGE}; the slowest and the largest count", least=1)
    size: str = option("gpt2-124m", quick="tiny")


def measure(settings: ImportSettings, run: Run) -> dict[str, Any]:
    """All cases, one after the other."""
    # A library's own switch: nothing is downloaded.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # noqa: TID251
    from transformers.utils import logging

    logging.disable_progress_bar()
    wanted, outcomes = set(settings.only), []
    for case in [case for case in CASES if not wanted or {case.name, case.family} & wanted]:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as workshop:
            outcomes.append(check(case, Path(workshop)))
        verdict = "; ".join(outcomes[-1].problems) or "passed"
        say(f"{case.name}: {outcomes[-1].graph_error:.1e}, {verdict} ({time.monotonic() - began:.1f} s)")
    failed = [outcome.case.name for outcome in outcomes if outcome.problems]
    found: dict[str, Any] = {
        "cases": len(outcomes),
        "failed": failed,
        "max_error": max((outcome.graph_error for outcome in outcomes), default=0.0),
        "table": table_of(outcomes),
        "passed": not failed,
    }
    if not wanted or LARGE in wanted:
        # A child's peak memory counts from the fork on, so that its parent must be small.
        said = run_module(f"{__package__}._import_large", settings.size, str(settings.rounds), str(run.build))
        found["large"] = json.loads(said.splitlines()[-1])
        found["passed"] &= all(each["kept"] for each in found["large"]["promises"])
    return found


def table_of(outcomes: Iterable[Outcome]) -> list[str]:
    """Markdown: a line for each case."""

    def counted(count: int, ties: int) -> str:
        return f"{count} of {count}{f', {ties} at a tie' if ties else ''}" if count else ""

    rows = [
        [
            f"`{each.case.family}`",
            each.case.says,
            *(f"{error:.1e}" for error in (each.torch_error, each.graph_error)),
            f"{each.spread:.1f}",
            counted(each.num_greedy, each.num_greedy_ties),
            counted(each.num_beams, each.num_beam_ties),
        ]
        for each in outcomes
    ]
    headings = "`model_type`|configuration|error in torch|error of the graph|spread|greedy|beams"
    return table(headings, rows, text_columns=2)


def render(results: Results) -> str:
    """The document."""
    lines = ["# Imported models beside transformers", "", *results["table"]]
    if large := results.get("large"):
        rows = [
            [step["name"], step["precision"], f"{step['seconds']:.1f}", f"{step['peak_bytes'] / 1e6:.0f}"]
            for step in large["steps"]
        ]
        lines += ["", "## A model of 124 million parameters", ""]
        lines += [*table("step|precision|seconds|peak memory, MB", rows, text_columns=2), ""]
        lines += [f"{each['text']}: {'kept' if each['kept'] else '**broken**'}." for each in large["promises"]]
    return "\n".join(lines)


SCENARIO = Scenario(__name__, ImportSettings, measure, render, must_hold=True)
