"""OpenAI's and vLLM's names for the fields of a request of ours, and back, for errors.

A request becomes the message that gRPC takes, and `transport.codec` validates it: one set of limits and defaults for
both transports. A field that is not in these tables is refused by name, never ignored; null is as good as absent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as _Type
from google.protobuf.message import Message

from onward.v1 import generation_pb2 as pb
from service.errors import InvalidRequest, UnsupportedFeature

Setter = Callable[[pb.GenerateRequest, str, Any], None]

_MAX_ID_DIGITS = 10
_INTEGER, _FLOAT = (int, "an integer"), (float, "a number")
_SCALARS: Mapping[int, tuple[type, str]] = {
    _Type.CPPTYPE_BOOL: (bool, "true or false"),
    _Type.CPPTYPE_STRING: (str, "a string"),
    **dict.fromkeys((_Type.CPPTYPE_INT32, _Type.CPPTYPE_INT64, _Type.CPPTYPE_UINT32, _Type.CPPTYPE_UINT64), _INTEGER),
    **dict.fromkeys((_Type.CPPTYPE_FLOAT, _Type.CPPTYPE_DOUBLE), _FLOAT),
}

PATHS: Mapping[str, str] = {
    # OpenAI's.
    "model": "model",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "seed": "sampling.seed",
    "n": "sampling.n",
    "logit_bias": "sampling.logit_bias",
    "max_tokens": "stopping.max_tokens",
    "stop": "stopping.stop",
    # vLLM's.
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "allowed_token_ids": "sampling.allowed_token_ids",
    "min_tokens": "stopping.min_tokens",
    "stop_token_ids": "stopping.stop_token_ids",
    "ignore_eos": "stopping.ignore_eos",
    "include_stop_str_in_output": "stopping.include_stop_in_output",
    "length_penalty": "beam_search.length_penalty",
    "priority": "priority",
    "request_id": "request_id",
    # Ours.
    "beam_size": "beam_search.beam_size",
    "patience": "beam_search.patience",
    "no_repeat_ngram_size": "beam_search.no_repeat_ngram_size",
    "target_prefix": "target_prefix",
    "timeout_seconds": "timeout_seconds",
    "partial_on_deadline": "partial_on_deadline",
    "cost": "response.cost",
}
"""The fields that both kinds of requests have, by their names here, and what they set."""
BEAMS = "use_beam_search"
"""vLLM's switch: `n` is then the number of hypotheses, and `beam_size` that of beams, by default as many."""
_BEAM_FIELDS = tuple(name for name, path in PATHS.items() if path.startswith("beam_search."))
_NAMES = {path: name for name, path in PATHS.items()} | {
    "beam_search.num_hypotheses": "n",
    "response.logprobs": "logprobs",
    "beam_search": BEAMS,
}
_PATH = re.compile(r"\b(?:(?:sampling|stopping|beam_search|response)\.\w+|beam_search|structured_output)\b")


def set_fields(request: pb.GenerateRequest, values: Mapping[str, Any], paths: Mapping[str, str]) -> None:
    """Sets a request's fields of `paths`.

    Raises:
        InvalidRequest: naming the first field of a wrong type, or the first that means nothing here.
    """
    uses_beams = take(values, BEAMS, bool, "true or false") or False
    for name in _BEAM_FIELDS:
        if not uses_beams and values.get(name) is not None:
            raise InvalidRequest(name, values[name], f"means nothing without {BEAMS}")
    for name, path in paths.items():
        if (value := values.get(name)) is None:
            continue
        if uses_beams and name == "n":
            path = "beam_search.num_hypotheses"  # noqa: PLW2901
        set_field(request, path, name, value)
    if uses_beams:
        asked = request.beam_search
        if values.get("beam_size") is None:
            asked.beam_size = asked.num_hypotheses if asked.HasField("num_hypotheses") else 1


def set_field(request: pb.GenerateRequest, path: str, name: str, value: Any) -> None:
    """Sets one field from JSON; `name` is for errors.

    Raises:
        InvalidRequest: for a value that the field cannot have.
    """
    part, _, leaf = path.rpartition(".")
    message: Message = reduce(getattr, part.split("."), request) if part else request
    field = message.DESCRIPTOR.fields_by_name[leaf]
    try:
        if field.message_type is not None:
            _set_biases(getattr(message, leaf), name, value)
        elif field.is_repeated:
            getattr(message, leaf).extend(_list(name, value, *_SCALARS[field.cpp_type]))
        else:
            kind, noun = _SCALARS[field.cpp_type]
            setattr(message, leaf, _scalar(name, value, kind, noun))
    except UnicodeEncodeError as error:
        raise InvalidRequest(name, "a lone surrogate", "must be Unicode text") from error
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(name, value, "is out of its type's range") from error


def _set_biases(biases: Any, name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise InvalidRequest(name, value, "must be an object: token ids and biases")
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS):
            raise InvalidRequest(f"{name}[{key}]", key, "its name must be a token id")
        biases[int(key)] = _scalar(f"{name}[{key}]", bias, float, "a number")


def _list(name: str, value: Any, kind: type, noun: str) -> list[Any]:
    if kind is str and isinstance(value, str):
        return [value]  # one stop string as it is
    if not isinstance(value, list):
        raise InvalidRequest(name, value, f"must be a list, each {noun}")
    if not set(map(type, value)) <= {kind}:
        index = next(index for index, each in enumerate(value) if type(each) is not kind)
        raise InvalidRequest(f"{name}[{index}]", value[index], f"must be {noun}")
    return value


def _scalar(name: str, value: Any, kind: type, noun: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise InvalidRequest(name, value, f"must be {noun}")
    return value


def set_text(message: Any, field: str, value: Any, place: str) -> None:
    """Sets a text of a message."""
    if not isinstance(value, str):
        raise InvalidRequest(place, value, "must be a string")
    try:
        setattr(message, field, value)
    except UnicodeEncodeError as error:
        raise InvalidRequest(place, "a lone surrogate", "must be Unicode text") from error


def take(values: Mapping[str, Any], name: str, kind: type, noun: str) -> Any:
    """The value of a field that is no part of the message, None where it is absent.

    Raises:
        InvalidRequest: for a value of another type.
    """
    value = values.get(name)
    return None if value is None else _scalar(name, value, kind, noun)


def refuse_others(
    values: Mapping[str, Any],
    known: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
    unsupported: Collection[str],
    place: str = "",
) -> None:
    """Refuses every field that has no effect here.

    Args:
        values: of the request, or a part of it at `place`.
        known: fields that have an effect.
        neutral: others, with the values that ask for what is done anyway.
        unsupported: fields that OpenAI has, for the wording.
        place: the part's path; empty for the request itself.

    Raises:
        UnsupportedFeature, InvalidRequest: naming the first.
    """
    for name, value in values.items():
        if name in known or value is None or any(_same(value, each) for each in neutral.get(name, ())):
            continue
        field = f"{place}.{name}" if place else name
        if name in neutral:
            shown = " or ".join(repr(each) for each in neutral[name])
            raise UnsupportedFeature(field, f"is not supported, other than {shown}")
        if name in unsupported:
            raise UnsupportedFeature(field, "is not supported")
        raise InvalidRequest(field, value, "is not a field of this request")


def _same(value: Any, neutral: Any) -> bool:
    """Whether both are the same JSON; 0 is not false."""
    return type(value) is type(neutral) and bool(value == neutral)


@contextmanager
def renaming(prompt: str, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Errors of the block name fields as they are named here.

    Args:
        prompt: the name of the prompt's field.
        names: by path, where they are other than those of `PATHS`.
    """
    by_path = {**_NAMES, **(names or {})}

    def name_of(path: str) -> str:
        # Behind it are an index, or a place in a schema.
        base = re.split(r"[\[#]", path, maxsplit=1)[0]
        if base in by_path:
            return f"{by_path[base]}{path[len(base) :]}"
        if base.startswith("prompt."):
            return f"{prompt}{path[len(base) :]}"
        return path

    try:
        yield
    except InvalidRequest as error:
        limit = _PATH.sub(lambda match: by_path.get(match.group(), match.group()), error.limit)
        raise type(error)(name_of(error.field), error.value, limit) from error
    except UnsupportedFeature as error:
        raise UnsupportedFeature(name_of(error.field), error.why) from error
