"""Reads the tokens that end, begin, force and forbid outputs: generation_config.json, else config.json.

Also reads when a beam search ends, and the defaults of what a request can set itself. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.hf.folder import CONFIG, GENERATION, HfFolder
from model.hf.values import Values, shorten
from model.spec.config import ModelConfig
from model.spec.generation import MAX_PATIENCE, GenerationRules, GenerationSettings, ignored_defaults

_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2},
    "mistral": {"bos_token_id": 1, "eos_token_id": 2},
    "gpt2": {"bos_token_id": 50256, "eos_token_id": 50256},
    "bart": {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2}
    | {"forced_eos_token_id": 2},
    "marian": {"eos_token_id": 0, "pad_token_id": 58100, "decoder_start_token_id": 58100, "forced_eos_token_id": 0},
}
"""Transformers' defaults for tokens that config.json omits, by `model_type`."""

_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": (),
    "constraints": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_decoder_ids": (),
    "guidance_scale": (1.0,),
    "sequence_bias": (),
}
"""Unsupported settings that change outputs, and their neutral values."""

_REQUESTS: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (),
    "length_penalty": (1.0,),
    "max_length": (20,),
    "max_new_tokens": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0.0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "repetition_penalty": (1.0,),
    "temperature": (1.0,),
    "top_k": (0,),
    "top_p": (1.0,),
    "typical_p": (1.0,),
}
"""Settings of a request, and values that change nothing."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Settings, ids for a `ModelConfig`, and `defaults` of requests, by transformers' names."""

    settings: GenerationSettings
    pad_id: int
    start_id: int
    defaults: Mapping[str, Any]


def read_tokens(folder: HfFolder, problems: list[str], notes: list[str], *, is_encoder_decoder: bool) -> Tokens | None:
    """The settings and tokens of a model; None if no token ends an output."""
    has_file = folder.file(GENERATION) is not None
    model_type = str(folder.config.get("model_type"))
    described = Values(CONFIG, {**_DEFAULTS.get(model_type, {}), **folder.config}, problems)
    asked = Values(GENERATION, folder.generation, problems) if has_file else described
    for name, neutral in _REFUSED.items():
        if asked.get(name) not in (None, [], {}, *neutral):
            asked.refuse(name, "which is not supported")
    eos_ids = asked.tokens("eos_token_id") or described.tokens("eos_token_id")
    if not eos_ids:
        problems.append(f"no token ends an output: neither {GENERATION} nor {CONFIG} has eos_token_id")
        return None

    def first(name: str) -> int | None:
        return asked.token(name) if asked.get(name) is not None else described.token(name)

    start = first("bos_token_id")
    if is_encoder_decoder:
        own = first(name := "decoder_start_token_id")
        start = start if own is None else own
        if start is None:
            problems.append(f"no token begins an output: neither {GENERATION} nor {CONFIG} has {name} or bos_token_id")
    rules = GenerationRules(
        forced_first_id=asked.token("forced_bos_token_id"),
        forced_last_id=asked.token("forced_eos_token_id"),
        suppressed_ids=_suppressed(asked, eos_ids),
        renormalize=asked.flag("renormalize_logits", default=False),
        patience=_patience(asked),
    )
    if rules.forced_first_id is not None and not is_encoder_decoder:
        asked.refuse("forced_bos_token_id", "a decoder-only model's output begins with its prompt")
    pad = _pad(asked) if _pad(asked) is not None else _pad(described)
    defaults = {
        name: asked.get(name)
        for name, neutral in _REQUESTS.items()
        if asked.get(name) is not None and asked.get(name) not in neutral
    }
    ignored = ignored_defaults(defaults)
    for words, names in (
        ("generation defaults of requests", [name for name in defaults if name not in ignored]),
        ("generation defaults that are not applied, a request must ask for them", ignored),
    ):
        if names:
            notes.append(f"{words}: " + ", ".join(f"{name} {shorten(defaults[name])}" for name in names))
    return Tokens(
        settings=GenerationSettings(eos_ids, rules),
        pad_id=eos_ids[0] if pad is None else pad,
        start_id=eos_ids[0] if start is None else start,
        defaults=defaults,
    )


def _suppressed(asked: Values, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that are never generated; tokens that end an output are kept, as in transformers."""
    banned = list(asked.tokens("suppress_tokens"))
    words = asked.get("bad_words_ids")
    for word in words if isinstance(words, list) else [] if words is None else [words]:
        if not (isinstance(word, list) and len(word) == 1 and type(word[0]) is int and word[0] >= 0):
            asked.refuse("bad_words_ids", "only words of one token are supported")
            return ()
        if word[0] not in eos_ids:
            banned.append(word[0])
    return tuple(dict.fromkeys(banned))


def _patience(asked: Values) -> float:
    """When a beam search ends: by an estimate, when enough hypotheses have ended, or when none can improve."""
    value = asked.get("early_stopping")
    if value == "never":
        return MAX_PATIENCE
    if value is not None and not isinstance(value, bool):
        asked.refuse("early_stopping", "must be true, false or 'never'")
    return 1.0 if value is True else 0.0


def _pad(values: Values) -> int | None:
    """The first Llama checkpoints have -1 for none."""
    return None if values.get("pad_token_id") in (None, -1) else values.token("pad_token_id")


_THEIR_NAMES = {
    "forced_first_id": "forced_bos_token_id",
    "forced_last_id": "forced_eos_token_id",
    "suppressed_ids": "bad_words_ids or suppress_tokens",
}


def check_tokens(tokens: Tokens, config: ModelConfig) -> list[str]:
    """The ids outside a model's vocabulary."""
    size = config.vocab_size
    fillable = min(size, config.source_vocab_size) if config.is_encoder_decoder else size
    named = [("pad_token_id", tokens.pad_id, fillable), ("decoder_start_token_id", tokens.start_id, size)]
    named += [("eos_token_id", token, size) for token in tokens.settings.eos_ids]
    named += [(_THEIR_NAMES[name], token, size) for name, token in tokens.settings.rules.named_ids]
    return [f"{name} is {token}, must be in [0, {limit})" for name, token, limit in named if token >= limit]
