"""The engine alone in this process, without transport: requests, and steps until they end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from model.spec import golden
from model.spec.artifact import GOLDEN, TARGET_TOKENIZER, TOKENIZER, read_manifest
from model.spec.golden import Tolerance
from model.spec.tokenizer import Tokenizer
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_engine
from service.engine.scheduler import EngineLimits
from service.engine.sessions.session import SessionOptions
from service.engine.types import GenerationRequest, SamplingParams, StepOutput, StepStats, StoppingParams


def load_engine(folder: Path, limits: EngineLimits, threads: int) -> Engine:
    """An engine over an artifact, or over graphs emitted without a proof, on their device; warmed up as a server's."""
    manifest = read_manifest(folder)
    target = TARGET_TOKENIZER if TARGET_TOKENIZER in manifest.files else TOKENIZER
    decode = Tokenizer.load(folder / target).decode if target in manifest.files else lambda _: ""
    engine = build_engine(folder, manifest, decode, limits, SessionOptions(intra_op_threads=threads), LastRun())
    engine.verify_golden((), Tolerance())
    engine.prove_merged_chunks(golden.load(folder / GOLDEN) if GOLDEN in manifest.files else ())
    return engine


def greedy_request(
    name: str, prompt: Sequence[int], new: int, *, priority: int = 0, ignore_eos: bool = True
) -> GenerationRequest:
    """A request for so many greedy tokens."""
    return GenerationRequest(
        request_id=name,
        model="",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingParams(max_tokens=new, ignore_eos=ignore_eos),
        priority=priority,
    )


@dataclass(slots=True)
class Answers:
    """Tokens by request, cached prompt tokens by request, and statistics of each step."""

    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_cached: dict[str, int] = field(default_factory=dict)
    steps: list[StepStats] = field(default_factory=list)

    @property
    def num_preemptions(self) -> int:
        """Over all steps."""
        return sum(step.num_preemptions for step in self.steps)


def checked_step(engine: Engine) -> StepOutput:
    """One step.

    Raises:
        Exception: what a request failed with.
    """
    output = engine.step()
    for event in output.events:
        if event.error is not None:
            raise event.error
    return output


def serve(engine: Engine, arrivals: Iterable[tuple[int, GenerationRequest]]) -> Answers:
    """Runs requests to their ends; each arrives so many steps after the one before.

    Raises:
        Exception: what a request failed with.
    """
    answers = Answers()

    def step() -> None:
        output = checked_step(engine)
        answers.steps.append(output.stats)
        for event in output.events:
            if event.token_id is not None and not event.is_mute:
                answers.tokens[event.request_id].append(event.token_id)
                answers.num_cached[event.request_id] = event.num_cached_tokens

    for delay, request in arrivals:
        for _ in range(delay):
            step()
        engine.add_request(request)
    while engine.has_work:
        step()
    return answers
