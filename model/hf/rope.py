"""Rotary positions in a configuration.

Transformers 5 keeps everything in `rope_parameters`; earlier versions have `rope_theta` beside the other fields and the
rest in `rope_scaling`. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from model.hf.folder import CONFIG
from model.hf.values import Values, shorten
from model.spec.config import RopeScaling

TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_DEFAULT_THETA = 10000.0


def read_rope(values: Values, context: int, problems: list[str], notes: list[str]) -> dict[str, Any]:
    """The `rope_` fields of a `ModelConfig`; `context` is the configuration's `max_position_embeddings`."""
    new, old = values.table("rope_parameters"), values.table("rope_scaling")
    if new and old and dict(new) != dict(old):
        problems.append(f"{CONFIG}: rope_parameters and rope_scaling are both there and differ")
        return {}
    place = "rope_parameters" if new else "rope_scaling"
    table = dict(new or old)
    if any(isinstance(each, Mapping) for each in table.values()):
        problems.append(f"{CONFIG}: {place} differs from layer to layer, {', '.join(table)}: all must turn alike")
        return {}
    rope = Values(f"{CONFIG}: {place}", table, problems)
    theta = rope.number("rope_theta", values.number("rope_theta", _DEFAULT_THETA))
    if (share := rope.number("partial_rotary_factor", values.number("partial_rotary_factor", 1.0))) != 1.0:
        problems.append(f"{CONFIG}: partial_rotary_factor is {share}, only whole heads are turned")
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in TYPES:
        problems.append(f"{CONFIG}: rope_type is {shorten(kind)}, must be one of {', '.join(TYPES)}")
        return {}
    fields: dict[str, Any] = {"rope_theta": theta}
    if kind == "default":
        return fields
    original = rope.integer("original_max_position_embeddings", context)
    # Beside the other fields, it takes precedence.
    original = values.integer("original_max_position_embeddings", original)
    if kind == "dynamic":
        # Frequencies that change with the length would invalidate all cached keys. Up to this context they are
        # constant.
        rope.number("factor")
        notes.append(f"dynamic rope scaling begins beyond {context} tokens, where the context ends")
        return fields
    factor = rope.number("factor", context / original if kind == "yarn" else None)
    fields |= {"rope_scaling": RopeScaling(kind), "rope_factor": factor}
    if kind == "llama3":
        fields |= {
            "rope_original_context": original,
            "rope_low_frequency_factor": rope.number("low_freq_factor"),
            "rope_high_frequency_factor": rope.number("high_freq_factor"),
        }
    if kind == "yarn":
        fields |= {
            "rope_original_context": original,
            "rope_beta_fast": rope.number("beta_fast", 32.0),
            "rope_beta_slow": rope.number("beta_slow", 1.0),
            "rope_truncate": rope.flag("truncate", default=True),
            "rope_attention_factor": _yarn_attention_factor(rope, factor),
        }
    return fields


def _yarn_attention_factor(rope: Values, factor: float) -> float:
    """The given factor, or 0.1 ln(factor) + 1 (Peng et al., 2023, equation 22), or DeepSeek's ratio of two of these."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def lengthening(scale: float) -> float:
        return 1.0 + 0.1 * scale * math.log(factor) if factor > 1 else 1.0

    over, under = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    return lengthening(over) / lengthening(under) if over and under else lengthening(1.0)
