"""Takes the samples of the scaling study: which servers, which requests, in which order.

The project's own commands make and export models with random weights. Each is served by its own process on loopback,
at batch 1, one request at a time:

    whole      `--prefill-chunk` as long as the context, so that a prompt is one run of the graph. Prefill and decode;
               and decode without a cache, where every token sends the text so far as a new prompt. Only whole chunks
               are cached and no prompt fills this one, so nothing is cached
    chunked    the server's default. One-token streams, which also give the client's time to first token; the same
               again with one user of Locust
    source     an encoder-decoder of the same sizes: encoding, and decode on long sources. Each source is sent twice,
               for one token and for many, so that copying the encoder's cached output does not count as decode
    memory     the first two again, a fresh process for each length

A recurrent model of the same size (`benchmarks.training.recurrence`) reads texts in chunks and in one run. Every prompt
is random and new; a cache hit is an error. Each repeat takes all lengths once in a new order, so that drift of the
machine does not look like a slope. A warm-up pass goes first. Tokens with a cache take a fraction of a millisecond and
scatter most, so every prompt and source gives several samples, and short prompts and all sources have two turns a
repeat.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest import machine
from loadtest.child import run_module
from loadtest.scaling.probe import Answer, Probe, probing
from loadtest.serving import Server, serving
from model.spec.config import Architecture, ModelConfig

NUM_SPECIAL = 4
"""Prompts have no lower ids: those are control tokens."""
_QUIET = ("--log-level", "warning")
# The same provider on every machine; and no calibration, which would already use the memory of the longest prompt.
_PLAIN = ("--prefill-provider", "cpu", "--no-calibrate")
_KV_USAGE = re.compile(r"^onward_kv_cache_usage_ratio\{[^}]*\} (\S+)$", re.MULTILINE)
# Prompt tokens of a held request, and the most attempts to read the metrics during one.
_NUM_HELD, _MOST_SCRAPES = 16, 20
# Locust draws lengths at random: with so many draws per length on average, none is left out.
_LEAST_DRAWS = 10
_LOCUSTFILE = Path(__file__).parent.with_name("locustfile.py")
# Sources are padded to multiples of this.
_SOURCE_PADDING = 16
# KV rows of the encoder-decoder's server: one active, one for the cached source.
_SOURCE_ROWS = 2
_SAMPLES_OF_A_SOURCE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySettings:
    """StudySettings of the measurement; lengths are in tokens.

    Lengths are geometric, from `shortest` to the context. Decode generates `new` tokens, decode without a cache
    `new_without_cache`. `overrides` change the preset, as `key=value`: five times n* needs a longer context, and one KV
    head for all queries keeps the keys and values of the longest context (8 MiB) in the last-level cache; memory behind
    it is shared with others. An uncounted prompt as long, but not longer than `settle`, precedes each sample; 0 omits
    it. Sources are at most `source_context` long, to save
    time. `threads` leave one processor to the rest of the server and to the client, whose work would add noise.
    """

    preset: str = "law"
    overrides: tuple[str, ...] = ("context=16384", "num_kv_heads=1")
    num_lengths: int = 16
    repeats: int = 15
    shortest: int = 64
    new: int = 65
    new_without_cache: int = 2
    chunk: int = 128
    settle: int = 1024
    source_context: int = 8192
    num_memory_lengths: int = 6
    threads: int = field(default_factory=lambda: max(1, (os.cpu_count() or 1) - 1))
    seed: int = 0


SERIES: Mapping[str, str] = {
    "prefill": "seconds of a whole prompt's prefill, by the server",
    "prefill_chunked": "the same in chunks",
    "end_to_end": "seconds to the first token, by the client's clock, of the same requests in chunks",
    "locust": "seconds to the first token, by Locust's clock, one user, in chunks",
    "decode": "seconds between two tokens, by the server, at this mean context",
    "no_cache": "seconds for a token without a cache, by the server, at this mean context",
    "encoder": "seconds of a source's encoding and a first token, by the server",
    "cross_attention": "seconds between two tokens on a source of this length, by the server",
    "gru": "seconds of a recurrent model of the same size in ONNX Runtime, in chunks",
    "gru_whole": "the same in one run of its graph",
    "memory_whole": "peak resident bytes of a fresh server after one whole prompt",
    "memory_chunked": "the same in chunks",
    "memory_source": "the same in an encoder-decoder's server after one source",
    "kv": "bytes of keys and values in use, by the server's metrics, during a request",
}
"""The values of each series; a sample is a pair of length and value."""


@dataclass(slots=True)
class Found:
    """Samples by series, facts by name."""

    series: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {name: [] for name in SERIES})
    facts: dict[str, Any] = field(default_factory=dict)


Say = Callable[[str], None]


def carry_out(settings: StudySettings, build: Path, say: Say) -> Found:
    """Takes all samples; replaces the models in `build`, and reports progress to `say`.

    Raises:
        RuntimeError: if a model cannot be made, or a server gives a wrong answer.
    """
    study = _Study(settings, build, say)
    study.measure_decoder()
    study.measure_chunks()
    study.measure_source()
    study.measure_recurrence()
    study.measure_memory()
    return study.found


def geometric(shortest: int, longest: int, multiple: int, count: int) -> list[int]:
    """Distinct ascending multiples, nearly geometric, up to `longest`."""
    ratio = (longest / shortest) ** (1 / max(1, count - 1))
    wanted = [longest / ratio**step for step in reversed(range(count))]
    chosen: list[int] = []
    for value in wanted:
        least = chosen[-1] + multiple if chosen else multiple
        chosen.append(max(least, round(value / multiple) * multiple))
    most = longest // multiple * multiple
    return sorted({min(length, most) for length in chosen})


def passes(lengths: Sequence[int], repeats: int, source: random.Random) -> Iterator[int]:
    """All lengths once in each repeat, in a new order each time."""
    for _ in range(repeats):
        yield from source.sample(lengths, len(lengths))


class _Study:
    """One run of the study."""

    def __init__(self, settings: StudySettings, build: Path, say: Say) -> None:
        self._settings = settings
        self._build = build
        self._say = say
        self._random = random.Random(settings.seed)  # noqa: S311 (not for secrets)
        self._config = _make_artifact(build / "decoder", settings.preset, settings.overrides, say)
        self._lengths: list[int] = []
        self.found = Found()
        self.found.facts["config"] = self._config.to_dict()
        self.found.facts["caches"] = machine.caches()

    def measure_decoder(self) -> None:
        """Prefill of whole prompts, decode with and without a cache."""
        settings, series = self._settings, self.found.series
        same_tokens = asked_tokens = 0
        with self._serving("decoder", self._config.context) as (_, probe):
            limit = self._config.context - settings.new - settings.new_without_cache
            self._lengths = self._warm_up(probe, limit, 32)
            # A short text's samples scatter most and cost least.
            short = [length for length in self._lengths if length <= settings.settle]
            for length in self._passes("prefill, decode, no_cache", [*self._lengths, *short]):
                self._settle(probe, length)
                prompt = self._draw(length)
                answer = _fresh(probe.ask(prompt, settings.new))
                series["prefill"].append((length, answer.prefill))
                decode = [answer.per_token]
                text, seconds = list(prompt), []
                for _ in range(settings.new_without_cache):
                    # The tokens after the first are further samples of decode.
                    next_answer = _fresh(probe.ask(text, settings.new))
                    seconds.append(next_answer.prefill)
                    decode.append(next_answer.per_token)
                    text.append(next_answer.token_ids[0])
                series["decode"] += [(length + settings.new / 2, each) for each in decode]
                mean_context = length + (settings.new_without_cache - 1) / 2
                series["no_cache"].append((mean_context, math.fsum(seconds) / len(seconds)))
                pairs = zip(text[length:], answer.token_ids, strict=False)
                same_tokens += sum(ours == theirs for ours, theirs in pairs)
                asked_tokens += settings.new_without_cache
        self.found.facts["same_tokens_without_cache"] = [same_tokens, asked_tokens]

    def measure_chunks(self) -> None:
        """Prefill in chunks, and the client's time to first token."""
        settings, series = self._settings, self.found.series
        with self._serving("decoder", settings.chunk) as (server, probe):
            lengths = self._warm_up(probe, self._config.context - 2, settings.chunk)
            for length in self._passes("prefill_chunked, end_to_end", lengths):
                self._settle(probe, length)
                answer = _fresh(probe.stream(self._draw(length), 1))
                series["prefill_chunked"].append((length, answer.prefill))
                series["end_to_end"].append((length, answer.first_token))
            series["locust"] += self._ask_by_locust(server, lengths)

    def _ask_by_locust(self, server: Server, lengths: Sequence[int]) -> list[tuple[float, float]]:
        """Times to first token of one user of Locust, with about as many prompts of the same lengths.

        Raises:
            RuntimeError: if Locust or one of its requests fails.
        """
        settings = self._settings
        count = max(settings.repeats, _LEAST_DRAWS) * len(lengths)
        self._say(f"locust: {count} requests of one user")
        drawn, report = self._build / "locust-lengths", self._build / "locust.json"
        drawn.write_text("\n".join(map(str, lengths)), encoding="utf-8")
        report.unlink(missing_ok=True)
        run_module(
            "locust", "--locustfile", str(_LOCUSTFILE), "--host", server.target, "--headless", "--users", "1",
            "--loglevel", "WARNING", "--num-prompts", str(count), "--prompt-tokens", f"file:{drawn}",
            "--max-tokens", "1", "--seed", str(settings.seed), "--report", str(report), "--report-detailed",
        )  # fmt: skip
        requests = json.loads(report.read_text(encoding="utf-8"))["requests"]
        if failed := [each for each in requests if each["outcome"] != "finished"]:
            raise RuntimeError(f"{len(failed)} of Locust's {count} requests ended with {failed[0]['code']}")
        return [(float(each["prompt_tokens"]), each["arrivals"][0] - each["intended"]) for each in requests]

    def measure_source(self) -> None:
        """Encoding, and decode on long sources."""
        settings, series = self._settings, self.found.series
        recipe = self._build / "encoder-decoder.json"
        recipe.write_text(json.dumps({"model": self._with_encoder()}), encoding="utf-8")
        config = _make_artifact(self._build / "source", str(recipe), (), self._say)
        with self._serving("source", settings.chunk, rows=_SOURCE_ROWS) as (_, probe):
            lengths = self._warm_up(probe, config.source_context, _SOURCE_PADDING)
            for length in self._passes("encoder, cross_attention", 2 * lengths):
                self._settle(probe, length)
                source = self._draw(length)
                series["encoder"].append((length, _fresh(probe.ask(source, 1)).prefill))
                for _ in range(_SAMPLES_OF_A_SOURCE):
                    series["cross_attention"].append((length, probe.ask(source, settings.new).per_token))

    def _with_encoder(self) -> dict[str, Any]:
        """An encoder-decoder of the same sizes: long sources, short outputs."""
        config, settings = self._config, self._settings
        return {
            **config.to_dict(),
            "architecture": Architecture.ENCODER_DECODER,
            "num_encoder_layers": config.num_layers,
            "source_vocab_size": config.vocab_size,
            "source_context": min(config.context, settings.source_context),
            "context": 2 * settings.new,
        }

    def measure_recurrence(self) -> None:
        """A recurrent model at the lengths of the whole prompts, in chunks and in one run."""
        settings = self._settings
        for name, chunk in (("gru", settings.chunk), ("gru_whole", self._config.context)):
            with _recurrence(self._config, settings, chunk) as (facts, ask):
                self.found.facts["gru"] = facts
                for length in self._lengths:
                    ask(self._draw(length))
                for length in self._passes(name, self._lengths):
                    if settings.settle:
                        ask(self._draw(min(length, settings.settle)))
                    self.found.series[name].append((length, ask(self._draw(length))))

    def measure_memory(self) -> None:
        """Memory of one prompt, with a fresh server for each length."""
        settings, series, context = self._settings, self.found.series, self._config.context
        longest = context - 2
        for number, length in enumerate(geometric(longest // 8, longest, 1, settings.num_memory_lengths), start=1):
            self._say(f"memory: {number} of {settings.num_memory_lengths} lengths")
            for name, chunk in (("memory_whole", context), ("memory_chunked", settings.chunk)):
                with self._serving("decoder", chunk, metrics=True) as (server, probe):
                    self._note_start(name, server)
                    _fresh(probe.ask(self._draw(length), 1))
                    if (peak := server.peak_bytes()) is not None:
                        series[name].append((length, peak))
                    if chunk == context:
                        usage = self._kv_usage(server, probe, length)
                        series["kv"].append((length, usage * context * self._config.kv_bytes_per_token))
        longest = min(context, settings.source_context)
        for length in geometric(longest // 2, longest, 1, max(1, settings.num_memory_lengths // 2)):
            with self._serving("source", settings.chunk, rows=_SOURCE_ROWS) as (server, probe):
                self._note_start("memory_source", server)
                probe.ask(self._draw(length), 1)
                if (peak := server.peak_bytes()) is not None:
                    series["memory_source"].append((length, peak))

    def _note_start(self, name: str, server: Server) -> None:
        """Notes the peak before any request: the parity check at start takes memory."""
        if (peak := server.peak_bytes()) is not None:
            self.found.facts.setdefault("start_bytes", {})[name] = peak

    def _kv_usage(self, server: Server, probe: Probe, length: int) -> float:
        """The KV-cache usage ratio during a request of `length` tokens, most of them generated so that it lasts.

        Raises:
            RuntimeError: if every request ends before the metrics show it.
        """
        num_prompt = min(_NUM_HELD, length // 2)
        for _ in range(_MOST_SCRAPES):
            with probe.holding(self._draw(num_prompt), length - num_prompt):
                if usage := _kv_usage(server):
                    return usage
        raise RuntimeError(f"requests of {length} tokens ended before the server's metrics could be read")

    @contextmanager
    def _serving(
        self, name: str, chunk: int, *, rows: int = 1, metrics: bool = False
    ) -> Iterator[tuple[Server, Probe]]:
        flags = ["--threads", str(self._settings.threads), "--max-batch-size", str(rows), *_PLAIN, *_QUIET]
        flags += ["--prefill-chunk", str(chunk), *(("--metrics-port", "0") if metrics else ("--no-metrics",))]
        with serving(self._build / name / "models", *flags) as server, probing(server.target) as probe:
            yield server, probe

    def _warm_up(self, probe: Probe, limit: int, multiple: int) -> list[int]:
        """The lengths for a server; sends each once."""
        lengths = geometric(max(multiple, self._settings.shortest), limit, multiple, self._settings.num_lengths)
        for length in lengths:
            _fresh(probe.ask(self._draw(length), 1))
        return lengths

    def _passes(self, name: str, lengths: Sequence[int]) -> Iterator[int]:
        total = self._settings.repeats * len(lengths)
        for number, length in enumerate(passes(lengths, self._settings.repeats, self._random)):
            if number % len(lengths) == 0:
                self._say(f"{name}: {number} of {total}")
            yield length

    def _settle(self, probe: Probe, length: int) -> None:
        """Sends an uncounted prompt: the sample finds the processor's caches as in a sequence of equal requests."""
        if self._settings.settle:
            probe.ask(self._draw(min(length, self._settings.settle)), 1)

    def _draw(self, length: int) -> list[int]:
        """A new random prompt."""
        return self._random.choices(range(NUM_SPECIAL, self._config.vocab_size), k=length)


def _fresh(answer: Answer) -> Answer:
    """Checks that an answer had no cache hit.

    Raises:
        RuntimeError: if it had one.
    """
    if answer.cached_tokens:
        raise RuntimeError(f"{answer.cached_tokens} tokens of a new prompt were cached")
    return answer


def _make_artifact(folder: Path, recipe: str, overrides: Sequence[str], say: Say) -> ModelConfig:
    """Makes `folder/models/model`: random weights, exported and verified.

    Raises:
        RuntimeError: if a command fails, with the end of its stderr.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    checkpoint, artifact = folder / "checkpoint", folder / "models" / "model"
    changes = [part for override in overrides for part in ("--set", override)]
    say(f"making {recipe}")
    run_module("model", "init", recipe, "--out", str(checkpoint), "--seed", "0", *changes)
    run_module("export", str(checkpoint), "--out", str(artifact), "--device", "cpu", "--precision", "fp32")
    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    return ModelConfig.from_dict(manifest["config"])


@contextmanager
def _recurrence(
    config: ModelConfig, settings: StudySettings, chunk: int
) -> Iterator[tuple[dict[str, Any], Callable[[Sequence[int]], float]]]:
    """Starts a child that times a recurrent model of the transformer's size; yields its facts and a timer of texts."""
    command = [sys.executable, "-m", "benchmarks.training.recurrence", "--config", json.dumps(config.to_dict())]
    command += ["--threads", str(settings.threads), "--chunk", str(chunk), "--seed", str(settings.seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:  # noqa: S603
        asked, answers = child.stdin, child.stdout
        assert asked is not None  # noqa: S101 (both are pipes; for the type checker)
        assert answers is not None  # noqa: S101

        def read() -> Any:
            line = answers.readline()
            if not line:
                raise RuntimeError(f"the recurrent model's process ended, exit code {child.wait()}")
            return json.loads(line)

        def ask(token_ids: Sequence[int]) -> float:
            asked.write(json.dumps(token_ids) + "\n")
            asked.flush()
            return float(read())

        yield read(), ask


def _kv_usage(server: Server) -> float:
    """A server's KV-cache usage ratio, from its metrics."""
    url = f"http://{server.metrics}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    if (usage := _KV_USAGE.search(text)) is None:
        raise RuntimeError("the server's metrics lack onward_kv_cache_usage_ratio")
    return float(usage[1])
