"""The engine that serves, over graphs on the device that is checked, and what it is asked.

Made by the server's own factory, which computes on the device that graphs are for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.gpu.workshop import Graphs
from model.spec.artifact import Device, GraphSpec
from model.spec.golden import Tolerance
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_engine
from service.engine.scheduler import EngineLimits
from service.engine.sessions.cuda_provider import Cuda
from service.engine.sessions.device_memory import Bindable
from service.engine.sessions.session import Binding, GraphSession, SessionOptions
from service.engine.types import GenerationRequest, SamplingParams, StepStats, StoppingParams, TokenEvent

OPTIONS = SessionOptions(intra_op_threads=1, allow_spinning=False)
"""Of the host's threads, which have no part of a graph to compute on a device."""


class EagerSession(GraphSession):
    """A graph, loaded as any other, whose runs are never captured whatever number they have."""

    def bind(self, inputs: Mapping[str, Bindable], outputs: Mapping[str, Bindable]) -> Binding:
        """See `GraphSession.bind`."""
        return _EagerBinding(super().bind(inputs, outputs))


class _EagerBinding(Binding):
    """Another binding, without the numbers of its runs."""

    def __init__(self, binding: Binding) -> None:
        self._of = binding

    def bind_inputs(self, inputs: Mapping[str, Bindable]) -> None:
        self._of.bind_inputs(inputs)

    def bind_outputs(self, outputs: Mapping[str, Bindable]) -> None:
        self._of.bind_outputs(outputs)

    def run(self, number: int | None = None) -> None:  # noqa: ARG002 (that is the point)
        self._of.run()


def load_session(graphs: Graphs, name: str, *, records: bool, kind: type[GraphSession] = GraphSession) -> GraphSession:
    """One of the graphs on the device that it is for; `records` says whether numbered runs are captured there.

    Raises:
        StartupError: when the device is not to be had, or refuses the graph.
    """
    spec: GraphSpec = graphs.manifest.graphs[name]
    cuda = Cuda(records=records) if graphs.manifest.device is Device.CUDA else None
    return kind(graphs.folder, spec, OPTIONS, cuda=cuda)


def make_engine(graphs: Graphs, limits: EngineLimits) -> Engine:
    """An engine as a server has it.

    Raises:
        StartupError: when the device is not to be had, refuses a graph, or has too little memory.
    """
    return build_engine(graphs.folder, graphs.manifest, lambda _: "", limits, OPTIONS, LastRun())


def greedy(name: str, prompt: Sequence[int], max_tokens: int, *, priority: int = 0) -> GenerationRequest:
    """A request for exactly so many most likely tokens, if the context holds them."""
    return GenerationRequest(
        request_id=name,
        model="",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        priority=priority,
    )


def draw_prompt(vocab_size: int, length: int, *seed: int) -> list[int]:
    """Random tokens, none of which controls anything."""
    tokens: list[int] = np.random.default_rng(seed).integers(3, vocab_size, length).tolist()
    return tokens


@dataclass(slots=True)
class Answers:
    """What an engine did: tokens by request, how many of each prompt were at hand, and every step's numbers."""

    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_cached: dict[str, int] = field(default_factory=dict)
    steps: list[StepStats] = field(default_factory=list)

    @property
    def num_preemptions(self) -> int:
        """Over all steps."""
        return sum(step.num_preemptions for step in self.steps)


def serve(engine: Engine, arrivals: Iterable[tuple[int, GenerationRequest]]) -> Answers:
    """Runs requests to their ends, each of which joins so many steps after the one before.

    Raises:
        Exception: what a request failed with.
    """
    answers = Answers()
    for delay, request in arrivals:
        for _ in range(delay):
            _step(engine, answers)
        engine.add_request(request)
    while engine.has_work:
        _step(engine, answers)
    return answers


def forget(engine: Engine) -> None:
    """Drops all that is kept of earlier prompts, so that the next request computes its own."""
    engine.verify_golden((), Tolerance())


def _step(engine: Engine, answers: Answers) -> tuple[TokenEvent, ...]:
    output = engine.step()
    answers.steps.append(output.stats)
    for event in output.events:
        if event.error is not None:
            raise event.error
        if event.token_id is not None:
            answers.tokens[event.request_id].append(event.token_id)
            answers.num_cached[event.request_id] = event.num_cached_tokens
    return output.events
