"""What a model wants of every output: tokens that end it, begin it, close it or never stand in it.

A checkpoint that others trained brings such wishes along (`model.hf`); one that was trained here has none but its end.
Standard library only; who chooses tokens (`service.engine.logits`) sees to it that they are kept.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GENERATION = "generation.json"
"""A checkpoint's file of `GenerationSettings`."""
MAX_PATIENCE = 1000.0
"""Of beam searches: more hypotheses than this never end."""


class GenerationError(ValueError):
    """Generation settings are malformed; `problems` lists everything that is wrong with them."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRules:
    """Token ids that hold whatever a request asks for.

    `forced_first_id` is an output's first token, unless the request gives its beginning. `forced_last_id` is its last
    where `max_tokens` or the context's end cuts it off. `suppressed_ids` are never chosen. With `renormalize` a beam
    search adds up the log-probabilities of what the rules leave, without it those of the whole vocabulary; a forced
    token counts as certain either way. `patience` is a beam search's whose request says nothing of it, as
    `service.engine.sampling.beam` explains it. All this is Hugging Face's `generate`, whose names for it are
    `forced_bos_token_id`, `forced_eos_token_id`, `bad_words_ids` and `suppress_tokens`, `renormalize_logits`, and
    `early_stopping`.
    """

    forced_first_id: int | None = None
    forced_last_id: int | None = None
    suppressed_ids: tuple[int, ...] = ()
    renormalize: bool = False
    patience: float = 1.0

    @property
    def named_ids(self) -> tuple[tuple[str, int], ...]:
        """Every id with its field's name."""
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
        problems = [f"unknown field {name!r}" for name in sorted(values.keys() - _CHECKS.keys())]
        problems += [
            f"{name} is {values[name]!r}, must be {words}"
            for name, (is_valid, words) in _CHECKS.items()
            if name in values and not is_valid(values[name])
        ]
        if problems:
            raise GenerationError(problems)
        return cls(**{**values, "suppressed_ids": tuple(values.get("suppressed_ids", ()))})


NO_RULES = GenerationRules()
"""Those of a model that was trained here."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """generation.json of a checkpoint: all tokens that end an output, one at least, and the rules."""

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
        if not isinstance(rules, dict):
            raise GenerationError([*problems, f"rules is {rules!r}, must be a JSON object"])
        parsed = GenerationRules.from_dict(rules)
        if problems:
            raise GenerationError(problems)
        return cls(tuple(eos_ids), parsed)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_id, value))


_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "forced_first_id": (lambda value: value is None or _is_id(value), "a token id or null"),
    "forced_last_id": (lambda value: value is None or _is_id(value), "a token id or null"),
    "suppressed_ids": (_is_ids, "a list of token ids"),
    "renormalize": (lambda value: isinstance(value, bool), "true or false"),
    "patience": (
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_PATIENCE,
        f"a number from 0 to {MAX_PATIENCE:g}",
    ),
}
