"""What guesses by look-up save a client that is alone: tokens per second with them and without, and that none differs.

    python -m benchmarks.look_up [--checkpoint build/checkpoints/stdlib] [--precision int8] [--look-up 8] [--prompts 12]
                                 [--prompt 192] [--new 192] [--repeats 5] [--quick] [--docs]

Over gRPC, one request at a time, on two servers that differ in `--look-up` alone and are asked in turns, the order
drawn for each prompt. The model is trained: what random weights say repeats itself for no reason. Prompts are of
held-out modules, which it never saw, in three tasks:

    continue   a module's beginning is gone on with, greedily; a small model's greedy text tends to come back to itself
    sample     the same beginning, gone on with by draws at temperature 1, by a seed for each prompt
    copy       a module's part, and once more its first half: who goes on copying finds what is next to say in the
               prompt, which is the kindest case that look-up has

A request's rate is that of its decoding: the tokens after its first, over the seconds from that to the last of them, as
the server tells them (`timings.decode`). Reading the prompt is not in it, for both servers have most of it at hand once
they have read it; its length counts, as a token takes the longer the more there are before it. A prompt's rate is the
median over the repeats.
All tokens of both servers must be equal, or nothing is told. The last line on stdout is one JSON object; the report
goes to `build/bench`.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import scenario
from benchmarks.frame.servers import served
from benchmarks.peers.onward import artifact, export
from benchmarks.peers.protocol import Options
from benchmarks.quality import held_out_text
from benchmarks.scenario_options import ScenarioSettings, at_least, new_parser, read_settings
from model.spec.artifact import TOKENIZER, load
from model.spec.tokenizer import BOS_ID, Tokenizer
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

NAME = "look-up"
_MODULE = "look_up"
WITHOUT, WITH = "without", "with"
COPY = "copy"
_SAMPLE = "sample"
TASKS: Mapping[str, str] = {
    "continue": "a module's beginning goes on, greedily; a small model's greedy text tends to come back to itself",
    _SAMPLE: "the same beginning goes on by draws at temperature 1: text that little leads back to itself",
    COPY: "a module's part, and once more its first half, so that the prompt has what is to be said next: the kindest "
    "case that look-up has, and no measure of others",
}
"""What is asked, and what that is."""
_TEXT_BYTES = 1 << 20
_TIMEOUT_SECONDS = 30.0
_MOST = "onward_spec_decode_max_draft_tokens"
_COUNTERS = {
    "drafts": "onward_spec_decode_num_drafts_total",
    "draft_tokens": "onward_spec_decode_num_draft_tokens_total",
    "accepted_tokens": "onward_spec_decode_num_accepted_tokens_total",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ScenarioSettings):
    """What is measured; lengths in tokens."""

    checkpoint: Path = Path("build/checkpoints/stdlib")
    look_up: int = 8
    prompts: int = 12
    prompt: int = 192
    new: int = 192
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the seed of the draws that answer it; None for a greedy answer."""

    token_ids: list[int]
    seed: int | None = None


@dataclass(slots=True)
class Told:
    """One answer: its tokens, and the seconds from the first of them to the last, by the server's clock."""

    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of those after the first."""
        return (len(self.token_ids) - 1) / self.seconds


def measure(settings: Settings, build: Path) -> dict[str, Any]:
    """Exports the model, serves it twice and measures.

    Raises:
        RuntimeError: when there is no such model, a server does not do as it should, or a token differs.
    """
    options = make_artifact(settings, build)
    folder = artifact(options)
    config = load(folder).config
    if settings.prompt + settings.new > config.context:
        raise RuntimeError(f"prompt and answer have {settings.prompt + settings.new} tokens, at most {config.context}")
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    texts = [tokenizer.encode_plain(text) for text in held_out_text(_TEXT_BYTES)]
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    asked = {task: questions(settings, texts, task) for task in TASKS}
    flags = ["--threads", str(settings.threads), "--max-batch-size", "2"]
    flags += ["--metrics-port", "0", "--log-level", "warning"]
    told: dict[str, dict[str, list[list[Told]]]] = {task: {} for task in TASKS}
    guessed: dict[str, dict[str, float]] = {}
    with (
        served(folder.parent, *flags, "--look-up", "0") as plain,
        served(folder.parent, *flags, "--look-up", str(settings.look_up)) as guessing,
    ):
        targets = {WITHOUT: plain.target, WITH: guessing.target}
        asyncio.run(_ask_all(targets, asked[COPY][:2], settings.new, source))  # does not count
        for task in TASKS:
            before = _counted(guessing.metrics)
            rounds = []
            for number in range(settings.repeats):
                print(f"{task}: repeat {number + 1}/{settings.repeats}", file=sys.stderr, flush=True)
                rounds.append(asyncio.run(_ask_all(targets, asked[task], settings.new, source)))
            told[task] = {way: [each[way] for each in rounds] for way in targets}
            after = _counted(guessing.metrics)
            guessed[task] = {name: after[name] - before[name] for name in after}
    return scenario.facts(NAME, _plain(settings)) | judge(told, guessed)


def make_artifact(settings: Settings, build: Path) -> Options:
    """The checkpoint's artifact, exported anew if the exporter has changed.

    Raises:
        RuntimeError: when there is no checkpoint, or it cannot be exported.
    """
    if not (settings.checkpoint / "run.json").exists():
        raise RuntimeError(f"{settings.checkpoint} is no checkpoint: `make demo` trains one")
    work = build / "scenarios" / NAME / settings.checkpoint.name
    options = Options(settings.checkpoint, work, settings.precision, settings.threads, 2, context=0)
    export(options)
    return options


def questions(settings: Settings, texts: Sequence[Sequence[int]], task: str) -> list[Question]:
    """One of each of the first modules that are long enough.

    Raises:
        RuntimeError: when too few are.
    """
    length = settings.prompt - 1
    draws = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    made = []
    for text in texts:
        if len(text) < length:
            continue
        part = list(text[:length])
        if task == COPY:
            # As long as the other tasks': a part, and its first half again.
            whole = 2 * length // 3
            part = [*text[:whole], *text[: length - whole]]
        made.append(Question([BOS_ID, *part], draws.getrandbits(32) if task == _SAMPLE else None))
        if len(made) == settings.prompts:
            return made
    raise RuntimeError(f"{len(made)} held-out modules have {length} tokens, {settings.prompts} are wanted")


def judge(
    told: Mapping[str, Mapping[str, Sequence[Sequence[Told]]]], guessed: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """What came out, by task: `told` has for each way a list of answers, prompt by prompt, for each repeat.

    Raises:
        RuntimeError: when any two answers to a prompt differ in a token.
    """
    found = {}
    for task, ways in told.items():
        for number, answers in enumerate(zip(*(each for way in ways.values() for each in way), strict=True)):
            if any(answer.token_ids != answers[0].token_ids for answer in answers):
                raise RuntimeError(f"{task}: answers to prompt {number} differ")
        rates = {
            way: [statistics.median(each.tokens_per_second for each in prompt) for prompt in zip(*rounds, strict=True)]
            for way, rounds in ways.items()
        }
        ratios = [after / before for before, after in zip(rates[WITHOUT], rates[WITH], strict=True)]
        counts = guessed[task]
        found[task] = {
            "tokens_per_second": {way: statistics.median(each) for way, each in rates.items()},
            "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
            "guesses": dict(counts),
            "accepted_share": counts["accepted_tokens"] / counts["draft_tokens"] if counts["draft_tokens"] else 0.0,
            "ratios": ratios,
        }
    return {"tasks": found, "tokens_equal": True}


async def _ask_all(
    targets: Mapping[str, str], asked: Sequence[Question], new: int, source: random.Random
) -> dict[str, list[Told]]:
    """Every question to every server, one request at a time."""
    told: dict[str, list[Told]] = {way: [] for way in targets}
    ways = list(targets)
    async with grpc.aio.insecure_channel(targets[WITHOUT]) as first, grpc.aio.insecure_channel(targets[WITH]) as second:
        stubs = {WITHOUT: GenerationServiceStub(first), WITH: GenerationServiceStub(second)}
        for question in asked:
            source.shuffle(ways)
            for way in ways:
                told[way].append(await ask(stubs[way], question, new))
    return told


async def ask(stub: GenerationServiceAsyncStub, question: Question, new: int) -> Told:
    """One answer of so many tokens.

    Raises:
        RuntimeError: when it has another number of them.
    """
    drawn = pb.SamplingParams(temperature=0.0)
    if question.seed is not None:
        drawn = pb.SamplingParams(temperature=1.0, seed=question.seed)
    request = pb.GenerateStreamRequest(
        token_ids=pb.TokenIds(ids=question.token_ids),
        sampling=drawn,
        stopping=pb.StoppingParams(max_tokens=new, ignore_eos=True),
    )
    told = Told()
    async for event in stub.GenerateStream(request):
        told.token_ids += event.delta.token_ids
        told.seconds = told.seconds or event.summary.timings.decode
    if len(told.token_ids) != new:
        raise RuntimeError(f"asked for {new} tokens, got {len(told.token_ids)}")
    return told


def _counted(metrics: str) -> dict[str, float]:
    """What a server has guessed so far.

    Raises:
        RuntimeError: when it never guesses.
    """
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=_TIMEOUT_SECONDS) as answer:
        text = answer.read().decode()
    values = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    if not values[_MOST]:
        raise RuntimeError("the server guesses nothing: it has told its log why")
    return {name: values[metric] for name, metric in _COUNTERS.items()}


def _plain(settings: Settings) -> Settings:
    """As JSON takes them."""
    return replace(settings, checkpoint=str(settings.checkpoint))  # type: ignore[arg-type]


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings = results["settings"]
    lines = [
        "# Guesses by look-up",
        "",
        f"{Path(settings['checkpoint']).name} {settings['precision']}, trained; one request at a time, "
        f"{settings['prompts']} prompts of {settings['prompt']} tokens from modules that it never saw, "
        f"{settings['new']} tokens each; `--look-up {settings['look_up']}` beside `--look-up 0`, medians of "
        f"{settings['repeats']} repeats, {settings['threads']} threads, on {results['machine']['processor']}. Rates "
        "are of decoding, after the first token: reading the prompt is not in them. All tokens are equal.",
        "",
        "| task | tokens/s without | with | with ÷ without | of a prompt, from | to | guessed | came true |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for task, each in results["tasks"].items():
        rate, ratio = each["tokens_per_second"], each["ratio"]
        lines.append(
            f"| {task}{' (the kindest case)' * (task == COPY)} | {rate[WITHOUT]:.0f} | {rate[WITH]:.0f} | "
            f"{ratio['median']:.2f} | {ratio['least']:.2f} | {ratio['most']:.2f} | "
            f"{each['guesses']['draft_tokens']:.0f} | {each['accepted_share']:.0%} |"
        )
    return "\n".join([*lines, "", *(f"- `{task}`: {what}." for task, what in TASKS.items()), ""])


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    settings, folder = _parse(sys.argv[1:])
    return scenario.tell(NAME, lambda: measure(settings, scenario.BUILD), render, folder, module=_MODULE)


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    parser = new_parser(_MODULE, __doc__, quick="two prompts, one repeat", model="")
    parser.add_argument("--checkpoint", type=Path, help="of a decoder-only model trained on stdlib")
    parser.add_argument("--look-up", type=at_least(1), help="tokens to guess at most")
    parser.add_argument("--prompts", type=at_least(1))
    parser.add_argument("--prompt", type=at_least(16), help="tokens of each")
    parser.add_argument("--new", type=at_least(2), help="tokens of an answer")
    parser.add_argument("--repeats", type=at_least(1))
    return read_settings(parser, arguments, Settings(threads=os.cpu_count() or 1), _shorten)


def _shorten(settings: Settings) -> Settings:
    return replace(settings, prompts=min(2, settings.prompts), repeats=1)


if __name__ == "__main__":
    sys.exit(main())
