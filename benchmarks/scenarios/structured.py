"""Structured output: tokens a second beside free text in a full batch, and steps that drafts save, forced tokens first.

Two questions, each over gRPC on a trained model, or on one of GPT-2's size with random weights:

    masks    a batch of streams whose schema never ends (an array of integers, which few tokens continue; a text, which
             most do) beside the same streams without a schema, as many tokens each, in interleaved rounds on one server
             without draft tokens. Greedy streams need a mask only where the model's choice is forbidden, those sampled
             at temperature 1 for each token
    drafts   one stream of a whole JSON document at a time, with draft tokens and without: the share of its tokens that
             were accepted as drafts, each of which saves a step, and its time. Tokens must be equal

Promise: with a schema ≥ 0.95 of the tokens a second without, both ways; steps saved ≥ 30 %.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.frame.models import METRICS, Subject, draw, export
from benchmarks.frame.rounds import interleaved
from benchmarks.frame.scenario import Results, Run, Scenario, Settings, option
from benchmarks.frame.servers import read_metrics
from benchmarks.frame.statistics import bootstrap, ratio_of_medians
from benchmarks.frame.streams import connected, greedy
from benchmarks.frame.tables import conditions, milliseconds, table, times, verdict
from benchmarks.scenarios._import_large import SIZES, import_random
from loadtest.serving import Server
from onward.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

FREE = "free text"
WITHOUT, WITH = "without", "with"
_TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
_LEAST_RATIO = 0.95
_LEAST_SAVED = 0.3
_ACCEPTED = "onward_spec_decode_num_accepted_tokens_total"
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}
ENDLESS = {
    "integers": json.dumps({"type": "array", "items": {"type": "integer"}, **_COMPACT, "minItems": 100_000}),
    "a text": json.dumps({"type": "string", "minLength": 100_000}),
}
"""Schemas by form."""
_FIELDS = {
    "status": {"enum": ["open", "closed", "waiting"]},
    "priority": {"type": "integer", "minimum": 0, "maximum": 9},
    "is_assigned": {"type": "boolean"},
    "summary": {"type": "string", "pattern": "^[a-z]{8}$"},
    "component": {"enum": ["server", "client", "exporter"]},
}
DOCUMENT = json.dumps(
    {"type": "object", "properties": _FIELDS, "required": list(_FIELDS), "additionalProperties": False, **_COMPACT}
)
_DOCUMENT_TOKENS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredSettings(Settings):
    """What is measured."""

    checkpoint: Path = option(  # noqa: RUF009
        Path("build/checkpoints/stdlib"),
        f"of a decoder-only model with a tokenizer, or random weights: {', '.join(SIZES)}",
    )
    streams: int = option(8, "at once", least=1, quick=2)
    prompt: int = option(32, "tokens of each", least=1)
    new: int = option(128, "tokens of a stream", least=2, quick=8)
    documents: int = option(10, "whole JSON documents in each round", least=1, quick=1)
    look_up: int = option(8, "draft tokens at most", least=1)
    rounds: int = option(7, "of all", least=1, quick=1)


@dataclass(frozen=True, slots=True)
class Written:
    """A document: its tokens and text, and the seconds it took."""

    token_ids: list[int]
    text: str
    seconds: float


def measure(settings: StructuredSettings, run: Run) -> dict[str, Any]:
    """Both questions, on two servers that differ in draft tokens alone.

    Raises:
        RuntimeError: if there is no such model, a stream is cut, or documents differ.
    """
    checkpoint, work = settings.checkpoint, run.build / "scenarios" / "structured" / settings.checkpoint.name
    if str(checkpoint) in SIZES:
        checkpoint = import_random(str(checkpoint), work)
    if not (checkpoint / "run.json").exists():
        raise RuntimeError(f"{checkpoint} is no checkpoint: `make demo` trains one")
    model = Subject(export(checkpoint, work, settings.precision), settings.threads, settings.streams)
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    count = max(settings.streams, settings.documents)
    prompts = [draw(source, model.config.vocab_size, settings.prompt) for _ in range(count)]
    with (
        model.served(*METRICS, "--look-up", "0") as plain,
        model.served(*METRICS, "--look-up", str(settings.look_up)) as drafting,
    ):
        results = judge(*asyncio.run(_all_rounds(plain, drafting, settings, prompts)))
    return {"vocab_size": model.config.vocab_size, **results}


def judge(
    rates: Mapping[str, Mapping[str, Sequence[float]]],
    written: Mapping[str, Sequence[Sequence[Written]]],
    accepted: float,
) -> dict[str, Any]:
    """What was measured, and whether the promise holds.

    Args:
        rates: tokens a second by way to choose, form and round.
        written: the same documents by way and round.
        accepted: draft tokens of all of them.

    Raises:
        RuntimeError: if documents differ, or one is not whole.
    """
    first = [each.token_ids for each in written[WITHOUT][0]]
    if any([each.token_ids for each in of_round] != first for rounds in written.values() for of_round in rounds):
        raise RuntimeError("documents differ between the servers")
    for each in written[WITHOUT][0]:
        if set(json.loads(each.text)) != set(_FIELDS):
            raise RuntimeError(f"a document lacks fields: {each.text}")
    seconds = {way: [sum(each.seconds for each in of_round) for of_round in rounds] for way, rounds in written.items()}
    pairs = {kind: {form: (each[form], each[FREE]) for form in each if form != FREE} for kind, each in rates.items()}
    ratios = {kind: {form: ratio_of_medians(*pair) for form, pair in each.items()} for kind, each in pairs.items()}
    intervals = {
        kind: {form: bootstrap(ratio_of_medians, *pair) for form, pair in each.items()} for kind, each in pairs.items()
    }
    least = min((intervals[kind][form] or (ratio,))[0] for kind, each in ratios.items() for form, ratio in each.items())
    saved = accepted / (len(written[WITH]) * sum(map(len, first)))
    return {
        "tokens_per_second": {
            kind: {form: statistics.median(each) for form, each in forms.items()} for kind, forms in rates.items()
        },
        "ratios": ratios,
        "ratio_intervals": intervals,
        "document_tokens": statistics.fmean(map(len, first)),
        "document_seconds": {way: statistics.median(each) / len(first) for way, each in seconds.items()},
        "steps_saved": saved,
        "speedup": ratio_of_medians(seconds[WITHOUT], seconds[WITH]),
        "speedup_interval": bootstrap(ratio_of_medians, seconds[WITHOUT], seconds[WITH]),
        "rounds": {"tokens_per_second": rates, "documents_seconds": seconds},
        "tokens_equal": True,
        "passed": least >= _LEAST_RATIO and saved >= _LEAST_SAVED,
    }


async def _all_rounds(
    plain: Server, drafting: Server, settings: StructuredSettings, prompts: Sequence[Sequence[int]]
) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[list[Written]]], float]:
    forms = {FREE: None, **{form: pb.StructuredOutput(json_schema=schema) for form, schema in ENDLESS.items()}}
    rates: dict[str, dict[str, list[float]]] = {kind: {form: [] for form in forms} for kind in _TEMPERATURES}
    written: dict[str, list[list[Written]]] = {WITHOUT: [], WITH: []}
    async with connected(plain.target) as slow, connected(drafting.target) as fast:
        stubs = {WITHOUT: slow, WITH: fast}
        for form in forms.values():  # warms up, and compiles
            await _rate(slow, settings, prompts, form, 0.0)
        for stub in stubs.values():
            await _write(stub, prompts[0])
        before = _accepted(drafting.metrics)
        ways = [(kind, form) for kind in _TEMPERATURES for form in forms]
        for _, (what, way) in interleaved(settings.rounds, (*ways, *(("", each) for each in stubs)), settings.seed):
            if what:
                rates[what][way].append(await _rate(slow, settings, prompts, forms[way], _TEMPERATURES[what]))
            else:
                asked = prompts[: settings.documents]
                written[way].append([await _write(stubs[way], prompt) for prompt in asked])
    return rates, written, _accepted(drafting.metrics) - before


async def _rate(
    stub: GenerationServiceAsyncStub,
    settings: StructuredSettings,
    prompts: Sequence[Sequence[int]],
    form: pb.StructuredOutput | None,
    temperature: float,
) -> float:
    """Tokens a second of all streams, from the first token to the last."""

    async def follow(prompt: Sequence[int], seed: int) -> list[float]:
        request = greedy(pb.GenerateStreamRequest, prompt, settings.new, structured_output=form)
        request.sampling.temperature, request.sampling.seed = temperature, seed
        arrivals: list[float] = []
        async for event in stub.GenerateStream(request):
            arrivals += [time.perf_counter()] * len(event.delta.token_ids)
        if len(arrivals) != settings.new:
            raise RuntimeError(f"asked for {settings.new} tokens, got {len(arrivals)}")
        return arrivals

    streams = await asyncio.gather(*map(follow, prompts[: settings.streams], range(settings.streams)))
    begin, end = min(each[0] for each in streams), max(each[-1] for each in streams)
    return sum(begin < at for each in streams for at in each) / (end - begin)


async def _write(stub: GenerationServiceAsyncStub, prompt: Sequence[int]) -> Written:
    request = greedy(
        pb.GenerateRequest, prompt, _DOCUMENT_TOKENS, structured_output=pb.StructuredOutput(json_schema=DOCUMENT)
    )
    began = time.perf_counter()
    (output,) = (await stub.Generate(request)).outputs
    return Written(list(output.token_ids), output.text, time.perf_counter() - began)


def _accepted(metrics: str) -> float:
    return float(next(sample.value for sample in read_metrics(metrics) if sample.name == _ACCEPTED))


def render(results: Results) -> str:
    """The document."""
    settings, seconds = results["settings"], results["document_seconds"]
    rows = [
        (
            f"{kind}, {form}",
            f"{rates[FREE]:,.0f}",
            f"{rates[form]:,.0f}",
            times(ratio, results["ratio_intervals"][kind][form]),
        )
        for kind, rates in results["tokens_per_second"].items()
        for form, ratio in results["ratios"][kind].items()
    ]
    lines = [
        "# Structured output",
        "",
        f"{Path(settings['checkpoint']).name} {settings['precision']}"
        f"{', random weights' if settings['checkpoint'] in SIZES else ''}, {results['vocab_size']:,} tokens in its "
        f"vocabulary, {settings['streams']} streams at once of {settings['new']} tokens, from the first token to the "
        f"last; medians of {settings['rounds']} interleaved rounds, {conditions(results)}.",
        "",
        *table(f"tokens/s|{FREE}|with a schema|ratio", rows),
        "",
        f"A JSON document of {results['document_tokens']:.0f} tokens by itself, five fields, takes "
        f"{milliseconds(seconds[WITHOUT])}, and {milliseconds(seconds[WITH])} under `--look-up {settings['look_up']}`: "
        f"{times(results['speedup'], results['speedup_interval'])} times as fast; {results['steps_saved']:.0%} of its "
        "tokens were drafts that needed no step of their own. Tokens are equal.",
        "",
        f"The promise, {_LEAST_RATIO} and {_LEAST_SAVED:.0%}, {verdict(results['passed'])}.",
    ]
    return "\n".join(lines)


SCENARIO = Scenario(__name__, StructuredSettings, measure, render)
