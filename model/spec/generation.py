"""A model's generation settings: end tokens, forced and suppressed tokens, and defaults of a request's fields.

Imported checkpoints (`model.hf`) bring them along; one trained here has only end tokens. The sampler
(`service.engine.sampling`) enforces them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GENERATION = "generation.json"
"""A checkpoint's file of `GenerationSettings`."""
MAX_PATIENCE = 1000.0
"""The limit of beam searches: with more patience, hypotheses never end."""
MAX_LENGTH_PENALTY = 10.0
"""Other servers take any number; a larger power of a length may overflow."""
_MAX_INT32 = 2**31 - 1


class GenerationError(ValueError):
    """Generation settings are malformed; `problems` lists everything that is wrong."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRules:
    """Rules that apply to every request, as in Hugging Face's `generate` (its names in parentheses).

    `forced_first_id` (`forced_bos_token_id`) is an output's first token, unless the request gives its beginning.
    `forced_last_id` (`forced_eos_token_id`) is its last if `max_tokens` or the context cuts it off. `suppressed_ids`
    (`bad_words_ids`, `suppress_tokens`) are never chosen. With `renormalize` (`renormalize_logits`) a beam search adds
    up the log-probabilities of the allowed tokens, otherwise those of the whole vocabulary; a forced token counts as
    certain either way. `patience` (`early_stopping`) is the default of beam searches (`service.engine.sampling.beam`).
    """

    forced_first_id: int | None = None
    forced_last_id: int | None = None
    suppressed_ids: tuple[int, ...] = ()
    renormalize: bool = False
    patience: float = 1.0

    @property
    def named_ids(self) -> tuple[tuple[str, int], ...]:
        """Every id, with its field's name."""
        forced = (("forced_first_id", self.forced_first_id), ("forced_last_id", self.forced_last_id))
        return (
            *((name, token) for name, token in forced if token is not None),
            *(("suppressed_ids", token) for token in self.suppressed_ids),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` is its inverse."""
        return {**dataclasses.asdict(self), "suppressed_ids": list(self.suppressed_ids)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GenerationRules:
        """Builds from JSON.

        Raises:
            GenerationError: listing every problem.
        """
        if problems := _rule_problems(values):
            raise GenerationError(problems)
        return cls(**{**values, "suppressed_ids": tuple(values.get("suppressed_ids", ()))})


NO_RULES = GenerationRules()
"""The rules of a model that was trained here."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """generation.json of a checkpoint: the tokens that end an output, at least one, and the rules."""

    eos_ids: tuple[int, ...]
    rules: GenerationRules = NO_RULES

    def to_json(self) -> str:
        """The text of generation.json."""
        values = {"eos_ids": list(self.eos_ids), "rules": self.rules.to_dict()}
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> GenerationSettings:
        """Parses generation.json.

        Raises:
            GenerationError: listing every problem.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise GenerationError([str(error)]) from error
        if not isinstance(values, dict) or values.keys() != {"eos_ids", "rules"}:
            raise GenerationError(["not a JSON object of eos_ids and rules"])
        eos_ids, rules = values["eos_ids"], values["rules"]
        problems = [] if _is_ids(eos_ids) and eos_ids else [f"eos_ids is {eos_ids!r}, must be a list of token ids"]
        problems += _rule_problems(rules) if isinstance(rules, dict) else [f"rules is {rules!r}, must be a JSON object"]
        if problems:
            raise GenerationError(problems)
        return cls(tuple(eos_ids), GenerationRules.from_dict(rules))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Values of the fields that a request leaves out, by their names on the wire; here, the wire contract's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 256
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0


WIRE_DEFAULTS = GenerationDefaults()


def read_defaults(recorded: Mapping[str, Any], *, is_encoder_decoder: bool) -> GenerationDefaults:
    """A model's own defaults.

    `do_sample` decides between greedy decoding (temperature 0) and sampling; without it an encoder-decoder is greedy
    and a decoder-only model samples.

    Args:
        recorded: settings of generation_config.json, by Hugging Face's names; `ignored_defaults` are skipped.
        is_encoder_decoder: the model's family.
    """
    own = {
        ours: recorded[theirs]
        for theirs, (ours, fits) in _DEFAULT_FIELDS.items()
        if theirs in recorded and fits(recorded[theirs])
    }
    samples = recorded.get("do_sample")
    if not (samples if isinstance(samples, bool) else not is_encoder_decoder):
        own["temperature"] = 0.0
    return GenerationDefaults(**own)


def ignored_defaults(recorded: Mapping[str, Any]) -> list[str]:
    """The settings that `read_defaults` skips: fields that a request does not have, or values that it cannot have."""
    return [
        name
        for name, value in recorded.items()
        if name != "do_sample" and not (name in _DEFAULT_FIELDS and _DEFAULT_FIELDS[name][1](value))
    ]


def _rule_problems(values: Mapping[str, Any]) -> list[str]:
    return [f"unknown field {name!r}" for name in sorted(values.keys() - _CHECKS.keys())] + [
        f"{name} is {values[name]!r}, must be {words}"
        for name, (is_valid, words) in _CHECKS.items()
        if name in values and not is_valid(values[name])
    ]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_id, value))


def _in_range(low: float, high: float) -> Callable[[object], bool]:
    return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _is_count(low: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= _MAX_INT32


_LEAST = math.nextafter(0.0, 1.0)
_DEFAULT_FIELDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "temperature": ("temperature", _in_range(0, math.nextafter(math.inf, 0.0))),
    "top_p": ("top_p", _in_range(_LEAST, 1)),
    "top_k": ("top_k", _is_count(0)),
    "min_p": ("min_p", _in_range(0, 1)),
    "repetition_penalty": ("repetition_penalty", _in_range(_LEAST, 2)),
    "max_new_tokens": ("max_tokens", _is_count(1)),
    "length_penalty": ("length_penalty", _in_range(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", _is_count(0)),
}
"""Hugging Face's names, ours, and whether a value is one that a request may have (`service.transport.codec`)."""
_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "forced_first_id": (lambda value: value is None or _is_id(value), "a token id or null"),
    "forced_last_id": (lambda value: value is None or _is_id(value), "a token id or null"),
    "suppressed_ids": (_is_ids, "a list of token ids"),
    "renormalize": (lambda value: isinstance(value, bool), "true or false"),
    "patience": (_in_range(0, MAX_PATIENCE), f"a number from 0 to {MAX_PATIENCE:g}"),
}
