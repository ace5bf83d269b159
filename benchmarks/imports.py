"""What imports, and how near it comes: `python -m benchmarks.imports [--write docs/models.md] [--only NAME …]`.

Every case is a configuration of one of transformers' own classes with random weights, saved as they save it, imported,
exported and served from the engine; transformers itself says what is right:

    torch     logits of the imported checkpoint
    graph     logits of the exported graph over golden schedules: whole prompts, chunks, ragged rows, single tokens
    greedy    64 tokens of the engine beside `generate`, ties aside
    beams     for encoder-decoders, hypotheses of the engine's search beside `generate` with as many beams

Weights are drawn so that logits spread like a trained model's; transformers' own start would leave them all but equal,
and any two models near each other. The largest logit error over a case is its figure.

Needs transformers. The table between the marks of the given file is replaced; the rest of the file is people's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.frame import tables as marks
from export.exporter import export
from export.replay import Replayer
from model import checkpoint
from model.hf.importer import FAMILIES, plan, write
from model.nn import reference
from model.spec import artifact, golden
from model.spec.artifact import TOKENIZER, Device, Precision
from model.spec.config import Architecture
from model.spec.golden import Float32, GoldenCase
from model.spec.tokenizer import Tokenizer
from model.tokenizer_training import one_word_per_id
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_engine
from service.engine.scheduler import EngineLimits
from service.engine.sessions.session import SessionOptions
from service.engine.types import BeamSearchParams, GenerationRequest, SamplingParams, StoppingParams

TOLERANCE = 1e-4
"""Of a logit, absolute."""
TIE = 1e-3
"""Two logits nearer than this may come in either order."""
GREEDY_TOKENS = 64
NUM_BEAMS = 4
BEAM_TOKENS = 18
NUM_SOURCES = 50

_SPREADS = 0.5, 50.0
_MIN_DISTINCT = 8
_MIN_LENGTHS = 4

_BEGIN = "<!-- imports: begin; written by python -m benchmarks.imports, do not edit -->"
_END = "<!-- imports: end -->"
_MAX_SHARD = "24KB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration.

    `model` has the fields of transformers' configuration that differ from the family's base here, `says` what is
    special about it, for people. `generation` are fields of its generation configuration. With `is_old` config.json is
    rewritten as transformers 4 wrote it. `dtype` is what weights are saved in.
    """

    name: str
    family: str
    says: str
    model: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    is_sharded: bool = False
    is_old: bool = False


_DECODER: Mapping[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = {name: value for name, value in _DECODER.items() if name != "head_dim"}
_SEQ2SEQ: Mapping[str, Any] = {
    "vocab_size": 160,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 72,
}
_BASES: Mapping[str, Mapping[str, Any]] = {
    "llama": _DECODER,
    "mistral": {**_DECODER, "sliding_window": None},
    "qwen2": _QWEN,
    "qwen3": _DECODER,
    "gpt2": {
        "vocab_size": 160,
        "n_positions": 96,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "bart": _SEQ2SEQ,
    "marian": {**_SEQ2SEQ, "pad_token_id": 159, "decoder_start_token_id": 159, "eos_token_id": 0}
    | {"forced_eos_token_id": 0},
}
_YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 3.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
_TAGGED = {"forced_bos_token_id": 7, "bad_words_ids": [[159]]}

CASES: tuple[Case, ...] = (
    Case(name="llama-odd-heads", family="llama", says="3 query heads on 1, untied, bf16, rope_theta on top",
         is_old=True, dtype=torch.bfloat16, model={"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}),
    Case(name="llama-llama3", family="llama", says="llama3 scaling, tied, in shards", is_sharded=True,
         model={"rope_parameters": _LLAMA3, "tie_word_embeddings": True, "num_attention_heads": 4,
                "num_key_value_heads": 2, "hidden_size": 64}),
    Case(name="llama-yarn", family="llama", says="YaRN, biases everywhere, 5 heads",
         model={"rope_parameters": _YARN, "attention_bias": True, "mlp_bias": True, "num_attention_heads": 5,
                "num_key_value_heads": 5, "hidden_size": 80}),
    Case(name="llama-linear", family="llama", says="linear scaling under rope_scaling, fp16", is_old=True,
         dtype=torch.float16, model={"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}}),
    Case(name="llama-dynamic", family="llama", says="dynamic scaling, heads wider than d / heads",
         model={"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}, "head_dim": 32}),
    Case(name="mistral-window", family="mistral", says="a window of 8, heads wider than d / heads",
         model={"sliding_window": 8, "head_dim": 32}),
    Case(name="mistral-no-window", family="mistral", says="no window, tied, as many key heads as query heads",
         model={"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64}),
    Case(name="mistral-yarn", family="mistral", says="a window of 33 and YaRN without whole bounds, two ends",
         model={"sliding_window": 33, "eos_token_id": [2, 5], "rope_parameters": {**_YARN, "truncate": False}}),
    Case(name="qwen2-untied", family="qwen2", says="3 query heads on 1, untied", model={}),
    Case(name="qwen2-tied", family="qwen2", says="tied, 4 query heads on 2, bf16", dtype=torch.bfloat16,
         model={"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}),
    Case(name="qwen2-upper-window", family="qwen2", says="a window of 12 over the upper of two layers, YaRN",
         model={"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1, "rope_parameters": _YARN}),
    Case(name="qwen3-wide-heads", family="qwen3", says="heads of 32 on a width of 48",
         model={"head_dim": 32}),
    Case(name="qwen3-tied", family="qwen3", says="tied, 4 query heads on 2, in shards", is_sharded=True,
         model={"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 2}),
    Case(name="qwen3-biases", family="qwen3", says="biases, a window of 10 over both layers, linear scaling",
         model={"attention_bias": True, "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 0,
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}}),
    Case(name="gpt2-tied", family="gpt2", says="3 heads, tied", model={}),
    Case(name="gpt2-untied", family="gpt2", says="5 heads, untied, a narrow network",
         model={"n_head": 5, "n_embd": 80, "n_inner": 56, "tie_word_embeddings": False}),
    Case(name="gpt2-exact-gelu", family="gpt2", says="exact GELU, fp16, saved without a prefix", is_old=True,
         dtype=torch.float16, model={"activation_function": "gelu"}),
    Case(name="bart-plain", family="bart", says="exact GELU, first token forced",
         generation={"forced_bos_token_id": 0}),
    Case(name="bart-scaled", family="bart", says="scaled embeddings, ReLU, 3 + 1 layers, in shards", is_sharded=True,
         model={"scale_embedding": True, "activation_function": "relu", "encoder_layers": 3, "decoder_layers": 1}),
    Case(name="bart-untied", family="bart", says="untied, 2 heads of 24, bf16, early stopping", dtype=torch.bfloat16,
         generation={"early_stopping": True, "num_beams": NUM_BEAMS},
         model={"tie_word_embeddings": False, "encoder_attention_heads": 2, "decoder_attention_heads": 2}),
    Case(name="marian-shared", family="marian", says="one vocabulary, scaled embeddings, SiLU, a word forbidden",
         model={"scale_embedding": True, "activation_function": "swish"}, generation={"bad_words_ids": [[159]]}),
    Case(name="marian-apart", family="marian", says="two vocabularies, ReLU, 5 heads of 8, renormalised",
         model={"share_encoder_decoder_embeddings": False, "vocab_size": 140, "decoder_vocab_size": 160,
                "activation_function": "relu", "d_model": 40, "encoder_attention_heads": 5,
                "decoder_attention_heads": 5, "pad_token_id": 139, "decoder_start_token_id": 139},
         generation={"bad_words_ids": [[139]], "renormalize_logits": True}),
    Case(name="marian-untied", family="marian", says="untied head, fp16, forced first token",
         dtype=torch.float16, model={"tie_word_embeddings": False}, generation=_TAGGED),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How near a case came. `spread` is the deviation of transformers' logits, beside which errors are to be seen.

    Of `num_greedy` continuations and `num_beams` searches all are equal or part at a tie; `num_greedy_ties` and
    `num_beam_ties` count the latter.
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


def make_folder(case: Case, folder: Path) -> Any:
    """Saves a case as transformers does, and returns what transformers reads again, in float32."""
    import transformers

    kind = FAMILIES[case.family].architecture
    config_class = getattr(transformers, _CONFIGS[case.family])
    config = config_class(**{**_BASES[case.family], **case.model})
    model = getattr(transformers, kind)(config).eval()
    _draw(model, seed=len(case.name) + sum(map(ord, case.name)))
    model.to(case.dtype)
    for name, value in case.generation.items():
        setattr(model.generation_config, name, value)
    size = _MAX_SHARD if case.is_sharded else "1GB"
    model.save_pretrained(folder, max_shard_size=size)
    sizes = {TOKENIZER: model.config.vocab_size}
    for name, vocab_size in sizes.items():
        words = one_word_per_id(vocab_size, Architecture.DECODER_ONLY)
        (folder / name).write_text(words.to_json(), encoding="utf-8")
    if case.is_old:
        _age(folder)
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()


_CONFIGS = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gpt2": "GPT2Config",
    "bart": "BartConfig",
    "marian": "MarianConfig",
}


# Deviations of matrices, times the root of their width. Attention that is too even, or a token that drowns all else,
# would make outputs of one word.
_GAINS = {"q_proj": 1.8, "k_proj": 1.8, "v_proj": 1.0, "o_proj": 1.5, "out_proj": 1.0, "fc1": 3.0, "fc2": 3.0}
_GAIN = 2.0
_POSITIONS = 0.5


def _draw(model: Any, seed: int) -> None:
    """Weights of which every one is felt, none drowns the others, and outputs are of many words."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            *_, module, part = name.split(".")
            if module == "embed_positions" and not parameter.requires_grad:
                continue  # sinusoids
            if parameter.ndim == 1:
                is_norm = "norm" in module or module.startswith("ln_")
                parameter.copy_(float(is_norm and part == "weight") + (0.1 if is_norm else 0.3) * normal(parameter))
            elif module in ("embed_positions", "wpe"):
                parameter.copy_(_POSITIONS * normal(parameter))
            elif module in ("embed_tokens", "shared", "wte", "lm_head"):
                parameter.copy_(_token_deviation(model.config) * normal(parameter))
            else:
                parameter.copy_(_GAINS.get(module, _GAIN) * parameter.shape[1] ** -0.5 * normal(parameter))
        model.tie_weights()
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(0.2 * normal(model.final_logits_bias))
            _let_it_end(model)


def _token_deviation(config: Any) -> float:
    """What is heard beside positions: sinusoids are louder than what is learned, and √d is a gain of its own."""
    if getattr(config, "scale_embedding", False):
        return 0.2
    return 0.7 if config.model_type == "marian" else 0.3


def _let_it_end(model: Any) -> None:
    """Gives the end of sequence a bias by which one output in ten ends with each token."""
    rng = np.random.default_rng(7)
    end = model.generation_config.eos_token_id
    leads = []
    sources = [rng.integers(3, 130, 12).tolist() for _ in range(10)]
    answers = _generate(model, sources, BEAM_TOKENS, num_beams=1, min_new_tokens=BEAM_TOKENS)
    for source, (said, _) in zip(sources, answers, strict=True):
        logits = _logits(model, [model.generation_config.decoder_start_token_id, *said[:-1]], source)
        leads.append(logits.max(axis=-1) - logits[:, end])
    model.final_logits_bias[0, end] += float(np.quantile(np.concatenate(leads), 0.04))


def _age(folder: Path) -> None:
    """Writes a folder as older releases did: rotary settings in two places, GPT-2 without a prefix."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if (rope := config.pop("rope_parameters", None)) is not None:
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    path.write_text(json.dumps(config))
    if config["model_type"] == "gpt2":
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        save_file(
            {name.removeprefix("transformer."): tensor for name, tensor in weights.items()},
            folder / "model.safetensors",
        )


def check(case: Case, workshop: Path, num_sources: int = NUM_SOURCES) -> Outcome:
    """Makes, imports, exports and serves one case in a folder of its own."""
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
    """Comparisons: equal, parted at a tie, or parted for no good reason; and what was to be said."""

    num_equal: int = 0
    num_ties: int = 0
    outputs: set[tuple[int, ...]] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def add(self, wanted: Sequence[int], gap: float | None, what: str) -> None:
        """Counts one; `gap` is how near the two were where they part, None where they do not."""
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
    manifest = artifact.load(folder)
    replayer = Replayer(folder, manifest)
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
            for event in self._engine.step().events:
                if event.error is not None:
                    raise event.error
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
    """What `generate` adds to prompts of one length, or makes of sources of any, up to each one's end; and scores."""
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
    """The tokens up to the first end; what `generate` fills a batch up with comes behind it."""
    wanted = ends if isinstance(ends, list) else [ends]
    first = next((place for place, token in enumerate(tokens) if token in wanted), len(tokens))
    return tokens[: first + 1]


def _too_uniform(outputs: Sequence[Sequence[int]]) -> list[str]:
    """Why outputs would show little, even if they are equal: few words, few different ones, or all equally long."""
    num_words, num_outputs = len(set().union(*outputs)), len({tuple(output) for output in outputs})
    problems = [f"outputs of {num_words} words: no measure"] if num_words < _MIN_DISTINCT else []
    if num_outputs < min(len(outputs), _MIN_DISTINCT):
        problems.append(f"{num_outputs} different outputs: no measure")
    if len(outputs) >= NUM_SOURCES and len(set(map(len, outputs))) < _MIN_LENGTHS:
        problems.append("outputs all but equally long: no measure")
    return problems


Comparison = tuple[list[int], float | None, str]
"""What transformers says; how near the two were where they part, None where they do not; and that in words."""


def _compare_greedy(theirs: Any, engine: _Engine, prompt: list[int]) -> Comparison:
    """Their gap is between the logits of the first different tokens."""
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
"""The same search, in their words and in ours; first of all as whoever trained the model wants it."""


def _compare_beams(
    theirs: Any,
    engine: _Engine,
    sources: Sequence[list[int]],
    their_words: Mapping[str, Any],
    our_words: Mapping[str, Any],
) -> Iterator[Comparison]:
    """Their gap is between the scores of the hypotheses; where these are the same, so must be what they are worth."""
    answers = _generate(theirs, sources, BEAM_TOKENS, num_beams=NUM_BEAMS, **their_words)
    for source, (wanted, wanted_score) in zip(sources, answers, strict=True):
        found, score = engine.run(source, BEAM_TOKENS, BeamSearchParams(beam_size=NUM_BEAMS, **our_words))
        gap = abs((score or 0.0) - (wanted_score or 0.0))
        said = f"{found} ({score:.4f}), must be {wanted} ({wanted_score:.4f}) with {dict(their_words)}"
        if found == wanted:
            yield wanted, None if gap < TIE else float("inf"), said
        else:
            yield wanted, gap, said


def run(cases: Sequence[Case], tell: Callable[[str], None]) -> list[Outcome]:
    """All cases, one after the other."""
    outcomes = []
    for case in cases:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as workshop:
            outcome = check(case, Path(workshop))
        outcomes.append(outcome)
        verdict = "; ".join(outcome.problems) or "as it must be"
        tell(f"{case.name}: {outcome.graph_error:.1e}, {verdict} ({time.monotonic() - began:.1f} s)")
    return outcomes


def table(outcomes: Iterable[Outcome]) -> str:
    """Markdown: a line for each case."""
    lines = [
        "| `model_type` | configuration | error in torch | error of the graph | spread | greedy | beams |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for each in outcomes:
        greedy = f"{each.num_greedy} of {each.num_greedy}" + _ties(each.num_greedy_ties)
        beams = f"{each.num_beams} of {each.num_beams}" + _ties(each.num_beam_ties) if each.num_beams else ""
        cells = (f"`{each.case.family}`", each.case.says, f"{each.torch_error:.1e}", f"{each.graph_error:.1e}")
        lines.append("| " + " | ".join((*cells, f"{each.spread:.1f}", greedy, beams)) + " |")
    return "\n".join(lines)


def _ties(count: int) -> str:
    return f", {count} at a tie" if count else ""


def replace_table(text: str, made: str) -> str:
    """A document with the table between its marks replaced; a ValueError where it has no such marks."""
    return marks.replace(text, _BEGIN, _END, made)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the matrix, tells stderr of each case, and prints the table or writes it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.imports", description="What imports, and how near.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the table in this document")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases, or families, to run")
    options = parser.parse_args(arguments)
    # A library's own switch: nothing is to be downloaded.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # noqa: TID251
    from transformers.utils import logging

    logging.disable_progress_bar()
    chosen = [case for case in CASES if not options.only or {case.name, case.family} & set(options.only)]
    outcomes = run(chosen, lambda line: print(line, file=sys.stderr))
    made = table(outcomes)
    if options.write:
        options.write.write_text(replace_table(options.write.read_text(encoding="utf-8"), made), encoding="utf-8")
    else:
        print(made)
    failed = [outcome for outcome in outcomes if outcome.problems]
    worst = max((outcome.graph_error for outcome in outcomes), default=0.0)
    print(json.dumps({"cases": len(outcomes), "failed": [each.case.name for each in failed], "max_error": worst}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
