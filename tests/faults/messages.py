"""Requests that no client of good will would send: messages of any type, built field by field from its descriptor.

Values are drawn near every limit and far beyond it, from one seeded source, so that a run can be had again.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from onward.inference import open_inference_pb2 as oip
from tests.faults.process import MODELS

_MAX_DEPTH = 4
_MODEL_NAMES = (*MODELS, *MODELS, *MODELS, "", "nobody", "../" + MODELS[0], "a" * 5000, "\x00", "😀")
_NAMED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("model", "model_name", "name"), _MODEL_NAMES),
    "text": ("3 May", "3 May 1977", "", " ", "<bos><eos><pad>", "\x00", "äöü" * 50, "a" * 5000, "é\u0301\u202e"),
    "stop": ("a", "", "b" * 300, "\n"),
    "max_tokens": (1, 2, 8, 30, 0, -1, 2**31 - 1, -(2**31)),
    "seed": (0, 1, 2**64 - 1),
    "temperature": (0.0, 0.0, 1.0, 0.01, -1.0, math.nan, math.inf, 1e308, 5e-324),
    "n": (1, 1, 2, 3, 0, -1, 1000, 2**31 - 1),
    "beam_size": (1, 2, 4, 0, -3, 10**6),
    # No test waits for a minute: some calls are over before they begin.
    "timeout_seconds": (10.0, 0.0, -1.0, 1e-9, 0.001, 0.01, math.nan, math.inf, 1e300),
}
# What a client of good will sends: most of the time, so that the engine has something to do.
_SANE: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("model", "model_name", "name"), MODELS),
    **dict.fromkeys(("version", "model_version"), ("", "1")),
    "repository_name": ("",),
    "role": ("user", "assistant"),
    "content": ("3 May", "<eos>"),
    "layers": (0, 1),
    "heads": (0, 1),
    "text": ("3 May", "3 May 1977", "äöü <eos>", "a" * 40),
    "ids": (3, 5, 17, 64, 200, 287),
    "max_tokens": (1, 2, 8, 30),
    "min_tokens": (0, 1, 3),
    "temperature": (0.0, 0.7, 1.0, 3.0),
    "top_p": (1.0, 0.5, 0.01),
    "top_k": (0, 1, 5),
    "min_p": (0.0, 0.2),
    "repetition_penalty": (1.0, 1.3),
    "presence_penalty": (0.0, -1.0, 2.0),
    "frequency_penalty": (0.0, -1.0, 2.0),
    "n": (1, 2, 3),
    "beam_size": (2, 3, 4),
    "num_hypotheses": (1, 2),
    "length_penalty": (0.0, 1.0),
    "patience": (0.0, 1.0, 2.0),
    "no_repeat_ngram_size": (0, 2),
    "logprobs": (0, 3, 20),
    "prompt_logprobs": (0, 3),
    "timeout_seconds": (10.0, 0.01),
    "stop": ("a", "e "),
    "target_prefix": ("3", "May"),
    "json_schema": ('{"type": "integer"}', '{"enum": ["a", "b"]}', '{"not": {}}'),
    "json": (True,),
    "regex": ("[0-9]+", "(a|b)*c", "("),
    "grammar": ('start: "a"+', "start: start"),
    "texts": ("yes", "no"),
}
_SANE_SHARE = 0.85
_FLOATS = (0.0, 1.0, 0.5, -1.0, 2.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 1e-3)
_SIGNED = (0, 1, 2, 5, -1, 20, 21, 64, 1000, 2**31 - 1, -(2**31))
_UNSIGNED = (0, 1, 2, 3, 5, 100, 287, 288, 300, 2**31, 2**32 - 1)
_TEXTS = ("", "a", "x" * 200, "\x00\x01", "😀")
_LENGTHS = (0, 1, 1, 2, 3, 20, 200)
_BYTES = (b"", b"a", b"\xff\xfe", b"\x05\x00\x00\x00abcde", b"\xff\xff\xff\xff", b"x" * 5000)
# Fields that a request is hardly anything without.
_TARGETS = frozenset({"text", "model", "model_name", "name", "request", "ids", "messages", "content"})
_MAX_SIGNED = 2**63 - 1


# What the Open Inference Protocol has as parameters, by name.
_PARAMETERS: Mapping[str, tuple[Any, ...]] = {
    **{
        name: (*_SANE.get(name, ()), *_NAMED.get(name, ()))
        for name in ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop", "target_prefix")
    },
    "beam_size": _SANE["beam_size"],
    "ignore_eos": (True, False, 1),
    "stop_token_ids": ("[3, 5]", "7", "[[]]", "[" * 5000),
    "logit_bias": ('{"5": 1.5}', '{"x": 1}', "[]"),
    "timeout": (10_000_000, 1000, 0, -1, 2**62),
    "triton_enable_empty_final_response": (True, False, "yes"),
    "nobody_knows": (1,),
}


def draw_message(kind: type[Message], source: random.Random) -> Any:
    """A message of a type, each field of it left out or set to something unlikely."""
    message = kind()
    if kind.DESCRIPTOR is oip.ModelInferRequest.DESCRIPTOR and source.random() < _SANE_SHARE:
        _begin_infer(message, source)
    _fill(message, kind.DESCRIPTOR, source, depth=0)
    return message


def _begin_infer(message: oip.ModelInferRequest, source: random.Random) -> None:
    """What chance would not come to: the one tensor that is wanted, and parameters under names that are known."""
    text = source.choice(_SANE["text"]).encode()
    tensor = message.inputs.add(name="text_input", datatype="BYTES", shape=source.choice(([1], [1, 1])))
    if source.random() < 0.5:
        tensor.contents.bytes_contents.append(text)
    else:
        message.raw_input_contents.append(struct.pack("<I", len(text)) + text)
    for name in source.sample(sorted(_PARAMETERS), source.choice((0, 1, 2, 4))):
        _set_parameter(message.parameters[name], source.choice(_PARAMETERS[name]))


def _set_parameter(parameter: oip.InferParameter, value: Any) -> None:
    match value:
        case bool():
            parameter.bool_param = value
        case int() if value > _MAX_SIGNED:
            parameter.uint64_param = value
        case int():
            parameter.int64_param = value
        case float():
            parameter.double_param = value
        case _:
            parameter.string_param = value


def _fill(message: Any, descriptor: Descriptor, source: random.Random, depth: int) -> None:
    # A request is mostly sane, or nothing would ever get past the first check.
    share = source.choice((0.0, 0.03, 0.03, 0.15, 0.6))
    fields = list(descriptor.fields)
    if source.random() < 0.3:
        # Or the first of a oneof would be all that is ever seen of it.
        source.shuffle(fields)
    for field in fields:
        likely = 0.95 if field.name in _TARGETS else max(share, 0.5) if field.name == "chat" else share
        if source.random() < likely and not _is_spoken_for(message, field, source):
            _set(message, field, source, depth)


def _is_spoken_for(message: Any, field: FieldDescriptor, source: random.Random) -> bool:
    """Whether another field of the same oneof is set, which would be unset again; sometimes that is wanted."""
    group = field.containing_oneof
    return group is not None and message.WhichOneof(group.name) is not None and source.random() < 0.9


def _set(message: Any, field: FieldDescriptor, source: random.Random, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(source.choice(_LENGTHS)):
            if value.message_type is None:
                getattr(message, field.name)[_value(key, source)] = _value(value, source)
            else:
                entry = getattr(message, field.name)[source.choice((_value(key, source), *_PARAMETERS))]
                _fill(entry, value.message_type, source, depth + 1)
    elif field.message_type is not None:
        if depth >= _MAX_DEPTH:
            return
        for _ in range(source.choice(_LENGTHS[:5]) if field.is_repeated else 1):
            inner = GetMessageClass(field.message_type)()
            _fill(inner, field.message_type, source, depth + 1)
            if field.is_repeated:
                getattr(message, field.name).append(inner)
            else:
                getattr(message, field.name).CopyFrom(inner)
    elif field.is_repeated:
        getattr(message, field.name).extend(_value(field, source) for _ in range(source.choice(_LENGTHS)))
    else:
        setattr(message, field.name, _value(field, source))


def _value(field: FieldDescriptor, source: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return source.choice(_BYTES)
    sane = _SANE.get(field.name)
    if sane is not None and isinstance(sane[0], _PYTHON_TYPES[field.cpp_type]) and source.random() < _SANE_SHARE:
        return source.choice(sane)
    choices = _NAMED.get(field.name)
    if choices is None or not isinstance(choices[0], _PYTHON_TYPES[field.cpp_type]):
        return _DRAWERS[field.cpp_type](source)
    return source.choice(choices)


_DRAWERS: Mapping[int, Callable[[random.Random], Any]] = {
    FieldDescriptor.CPPTYPE_INT32: lambda source: source.choice(_SIGNED),
    FieldDescriptor.CPPTYPE_INT64: lambda source: source.choice((*_SIGNED, 2**63 - 1)),
    FieldDescriptor.CPPTYPE_UINT32: lambda source: source.choice(_UNSIGNED),
    FieldDescriptor.CPPTYPE_UINT64: lambda source: source.choice((*_UNSIGNED, 2**64 - 1)),
    FieldDescriptor.CPPTYPE_DOUBLE: lambda source: source.choice(_FLOATS),
    # Beyond a float's range the library raises, and nothing would be sent.
    FieldDescriptor.CPPTYPE_FLOAT: lambda source: source.choice(
        [each for each in _FLOATS if not 1e300 < abs(each) < math.inf]
    ),
    FieldDescriptor.CPPTYPE_BOOL: lambda source: source.random() < 0.5,
    FieldDescriptor.CPPTYPE_ENUM: lambda source: source.choice((0, 1, 2, 77)),
    FieldDescriptor.CPPTYPE_STRING: lambda source: source.choice(_TEXTS),
}
_PYTHON_TYPES: Mapping[int, type | tuple[type, ...]] = {
    **dict.fromkeys(
        (
            FieldDescriptor.CPPTYPE_INT32,
            FieldDescriptor.CPPTYPE_INT64,
            FieldDescriptor.CPPTYPE_UINT32,
            FieldDescriptor.CPPTYPE_UINT64,
            FieldDescriptor.CPPTYPE_ENUM,
        ),
        int,
    ),
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_STRING: str,
}
