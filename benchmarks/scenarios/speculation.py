"""Prompt-lookup speculative decoding: tokens per second with draft tokens and without; same tokens.

Over gRPC, one request at a time or some together, on two servers that differ in `--look-up` alone, in an order drawn
for each. The model is trained: text of random weights repeats itself for no reason. Prompts are from held-out modules,
in three tasks:

    continue   a module's beginning, continued greedily; a small model's greedy text tends to repeat itself
    sample     the same beginning, continued by sampling at temperature 1, with a seed for each prompt
    copy       part of a module and its first half again: the continuation stands in the prompt, the best case

A request's rate is of decoding: tokens after the first, over the server's `timings.decode`. Prefill does not count,
since both servers have most of the prompt cached; its length does, as decoding slows down with it. A prompt's rate is
the median over the repeats. If any token differs between the servers there are no results.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.frame.models import METRICS, Subject, export
from benchmarks.frame.rounds import counted, shuffled
from benchmarks.frame.scenario import Results, Run, Scenario, Settings, option
from benchmarks.frame.servers import read_metrics
from benchmarks.frame.streams import connected, greedy
from benchmarks.frame.tables import conditions, table
from benchmarks.scenarios.quality import held_out_text
from model.spec.artifact import TOKENIZER
from model.spec.tokenizer import BOS_ID, Tokenizer
from onward.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

WITHOUT, WITH = "without", "with"
COPY = "copy"
_SAMPLE = "sample"
TASKS: Mapping[str, str] = {
    "continue": "a module's beginning, continued greedily; a small model's greedy text tends to repeat itself",
    _SAMPLE: "the same beginning, continued by sampling at temperature 1: text with few repeats",
    COPY: "part of a module and its first half again, so that the continuation stands in the prompt: the best case",
}
_TEXT_BYTES = 1 << 20
_MAX_DRAFT = "onward_spec_decode_max_draft_tokens"
_COUNTERS = {
    "drafts": "onward_spec_decode_num_drafts_total",
    "draft_tokens": "onward_spec_decode_num_draft_tokens_total",
    "accepted_tokens": "onward_spec_decode_num_accepted_tokens_total",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings(Settings):
    """What is measured; lengths in tokens."""

    checkpoint: Path = option(  # noqa: RUF009 (a field)
        Path("build/checkpoints/stdlib"), "of a decoder-only model trained on stdlib"
    )
    look_up: int = option(8, "draft tokens at most", least=1)
    prompts: int = option(12, "of each task", least=1, quick=2)
    in_flight: int = option(1, "requests together", least=1)
    prompt: int = option(192, "tokens of each", least=16)
    new: int = option(192, "tokens of an answer", least=2)
    repeats: int = option(5, "of all prompts", least=1, quick=1)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the seed of a sampled answer."""

    token_ids: list[int]
    seed: int | None = None


@dataclass(slots=True)
class Decoded:
    """An answer's tokens, and the seconds from the first to the last, on the server's clock."""

    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """After the first."""
        return (len(self.token_ids) - 1) / self.seconds


def measure(settings: SpeculationSettings, run: Run) -> dict[str, Any]:
    """Both servers side by side.

    Raises:
        RuntimeError: if there is no such model, the server does not speculate, or a token differs.
    """
    model = _make_subject(settings, run.build)
    context = model.config.context
    if settings.prompt + settings.new > context:
        raise RuntimeError(f"prompt and answer have {settings.prompt + settings.new} tokens, at most {context}")
    tokenizer = Tokenizer.load(model.folder / TOKENIZER)
    texts = [tokenizer.encode_plain(text) for text in held_out_text(_TEXT_BYTES)]
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    asked = {task: questions(settings, texts, task) for task in TASKS}
    answers: dict[str, dict[str, list[list[Decoded]]]] = {task: {} for task in TASKS}
    counts: dict[str, dict[str, float]] = {}
    with (
        model.served(*METRICS, "--look-up", "0") as plain,
        model.served(*METRICS, "--look-up", str(settings.look_up)) as speculating,
    ):
        targets = {WITHOUT: plain.target, WITH: speculating.target}
        asyncio.run(_ask_all(targets, asked[COPY][:2], settings.new, 1, source))  # warms up
        for task in TASKS:
            before = _counters(speculating.metrics)
            rounds = [
                asyncio.run(_ask_all(targets, asked[task], settings.new, settings.in_flight, source))
                for _ in counted(settings.repeats, f"{task}: repeat")
            ]
            answers[task] = {way: [each[way] for each in rounds] for way in targets}
            after = _counters(speculating.metrics)
            counts[task] = {name: after[name] - before[name] for name in after}
    return judge(answers, counts)


def _make_subject(settings: SpeculationSettings, build: Path) -> Subject:
    if not (settings.checkpoint / "run.json").exists():
        raise RuntimeError(f"{settings.checkpoint} is no checkpoint: `make demo` trains one")
    work = build / "scenarios" / "speculation" / settings.checkpoint.name
    return Subject(export(settings.checkpoint, work, settings.precision), settings.threads, max(2, settings.in_flight))


def questions(settings: SpeculationSettings, texts: Sequence[Sequence[int]], task: str) -> list[Question]:
    """One from each of the first modules that are long enough.

    Raises:
        RuntimeError: if too few are.
    """
    length = settings.prompt - 1
    seeds = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    made = []
    for text in texts:
        if len(text) < length:
            continue
        part = list(text[:length])
        if task == COPY:
            whole = 2 * length // 3
            part = [*text[:whole], *text[: length - whole]]
        made.append(Question([BOS_ID, *part], seeds.getrandbits(32) if task == _SAMPLE else None))
        if len(made) == settings.prompts:
            return made
    raise RuntimeError(f"{len(made)} held-out modules have {length} tokens, {settings.prompts} are wanted")


def judge(
    answers: Mapping[str, Mapping[str, Sequence[Sequence[Decoded]]]], counts: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """By task. `answers` has, for each way and repeat, one answer for each prompt.

    Raises:
        RuntimeError: if two answers to a prompt differ.
    """
    found = {}
    for task, ways in answers.items():
        for number, same in enumerate(zip(*(each for way in ways.values() for each in way), strict=True)):
            if any(answer.token_ids != same[0].token_ids for answer in same):
                raise RuntimeError(f"{task}: answers to prompt {number} differ")
        rates = {
            way: [statistics.median(each.tokens_per_second for each in prompt) for prompt in zip(*rounds, strict=True)]
            for way, rounds in ways.items()
        }
        ratios = [after / before for before, after in zip(rates[WITHOUT], rates[WITH], strict=True)]
        drafted = counts[task]["draft_tokens"]
        found[task] = {
            "tokens_per_second": {way: statistics.median(each) for way, each in rates.items()},
            "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
            "guesses": dict(counts[task]),
            "accepted_share": counts[task]["accepted_tokens"] / drafted if drafted else 0.0,
            "ratios": ratios,
        }
    return {"tasks": found, "tokens_equal": True}


async def _ask_all(
    targets: Mapping[str, str], asked: Sequence[Question], new: int, in_flight: int, source: random.Random
) -> dict[str, list[Decoded]]:
    """Every question to both servers, so many at a time."""
    answers: dict[str, list[Decoded]] = {way: [] for way in targets}
    async with connected(targets[WITHOUT]) as first, connected(targets[WITH]) as second:
        stubs = {WITHOUT: first, WITH: second}
        for first_asked in range(0, len(asked), in_flight):
            together = asked[first_asked : first_asked + in_flight]
            for way in shuffled(targets, source.random()):
                answers[way] += await asyncio.gather(*(ask(stubs[way], question, new) for question in together))
    return answers


async def ask(stub: GenerationServiceAsyncStub, question: Question, new: int) -> Decoded:
    """One answer.

    Raises:
        RuntimeError: if it has another number of tokens.
    """
    request = greedy(pb.GenerateStreamRequest, question.token_ids, new)
    if question.seed is not None:
        request.sampling.CopyFrom(pb.SamplingParams(temperature=1.0, seed=question.seed))
    answer = Decoded()
    async for event in stub.GenerateStream(request):
        answer.token_ids += event.delta.token_ids
        answer.seconds = answer.seconds or event.summary.timings.decode
    if len(answer.token_ids) != new:
        raise RuntimeError(f"asked for {new} tokens, got {len(answer.token_ids)}")
    return answer


def _counters(metrics: str) -> dict[str, float]:
    """Draft tokens so far.

    Raises:
        RuntimeError: if the server does not speculate.
    """
    values = {sample.name: sample.value for sample in read_metrics(metrics)}
    if not values[_MAX_DRAFT]:
        raise RuntimeError("the server does not speculate: its log says why")
    return {name: values[metric] for name, metric in _COUNTERS.items()}


def render(results: Results) -> str:
    """The document."""
    settings, rows = results["settings"], []
    for task, each in results["tasks"].items():
        rate, ratio = each["tokens_per_second"], each["ratio"]
        rows.append(
            [
                task + " (the best case)" * (task == COPY),
                *(f"{rate[way]:.0f}" for way in (WITHOUT, WITH)),
                *(f"{ratio[name]:.2f}" for name in ("median", "least", "most")),
                f"{each['guesses']['draft_tokens']:.0f}",
                f"{each['accepted_share']:.0%}",
            ]
        )
    lines = [
        "# Prompt-lookup speculative decoding",
        "",
        f"{Path(settings['checkpoint']).name} {settings['precision']}, trained; {settings['in_flight']} at a time, "
        f"{settings['prompts']} prompts of {settings['prompt']} tokens from held-out modules, {settings['new']} tokens "
        f"each; `--look-up {settings['look_up']}` beside `--look-up 0`, medians of {settings['repeats']} repeats, "
        f"{conditions(results)}. Rates are of decoding, after the first token. All tokens are equal.",
        "",
        *table("task|tokens/s without|with|with ÷ without|of a prompt, from|to|draft tokens|accepted", rows),
        "",
        *(f"- `{task}`: {what}." for task, what in TASKS.items()),
    ]
    return "\n".join(lines)


SCENARIO = Scenario(__name__, SpeculationSettings, measure, render)
