"""The Open Inference Protocol's tensors and parameters to a request of ours, and answers back.

A text model has one input, `text_input`, and one output, `text_output`: BYTES of shape [1]. Everything else about a
request is a parameter, named as in `onward.v1`: `temperature`, `max_tokens`, `beam_size`, … Lists and maps come as JSON
text, as in `stop` = '["a", "b"]'. Anything else is refused by name.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from onward.inference import open_inference_pb2 as oip
from onward.v1 import generation_pb2 as pb
from service.config import RequestLimits
from service.engine.types import FinishReason
from service.errors import InvalidRequest

TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
BYTES = "BYTES"
VERSION = "1"
"""The only version of every model."""
EMPTY_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"

_SHAPES = ([1], [1, 1])
_LENGTH_BYTES = 4
_MICROSECONDS = 1e6
# The parts of a request that have parameters.
_PARTS: Mapping[str, Descriptor] = {
    "sampling": pb.SamplingParams.DESCRIPTOR,
    "stopping": pb.StoppingParams.DESCRIPTOR,
    "beam_search": pb.BeamSearchParams.DESCRIPTOR,
}
_OWN = ("priority", "timeout_seconds", "partial_on_deadline", "target_prefix")
_FIELDS: Mapping[str, tuple[str | None, FieldDescriptor]] = {
    **{name: (None, pb.GenerateRequest.DESCRIPTOR.fields_by_name[name]) for name in _OWN},
    **{field.name: (part, field) for part, descriptor in _PARTS.items() for field in descriptor.fields},
}
_Type = FieldDescriptor
_INTEGER, _FLOAT = (int, "an integer"), (float, "a number")
_SCALARS: Mapping[int, tuple[type, str]] = {
    _Type.CPPTYPE_BOOL: (bool, "a truth value"),
    _Type.CPPTYPE_STRING: (str, "a text"),
    _Type.CPPTYPE_INT32: _INTEGER,
    _Type.CPPTYPE_INT64: _INTEGER,
    _Type.CPPTYPE_UINT32: _INTEGER,
    _Type.CPPTYPE_UINT64: _INTEGER,
    _Type.CPPTYPE_FLOAT: _FLOAT,
    _Type.CPPTYPE_DOUBLE: _FLOAT,
}
_TIMEOUT = "timeout"
"""The clients' name of a time limit in microseconds."""
# The event loop parses JSON: so many bytes take a few milliseconds. A token id with its bias fits into 64 bytes; a
# character may take two escapes.
_MAX_JSON_BYTES = 32 << 10
_MAX_NUMBER_BYTES = 64
_MAX_CHARACTER_BYTES = len(r"\ud83d\ude00")


@dataclass(frozen=True, slots=True)
class InferCall:
    """A request; `id` is the client's own, and may be empty."""

    id: str
    request: pb.GenerateRequest
    wants_empty_final: bool


def decode_infer(message: oip.ModelInferRequest, limits: RequestLimits) -> InferCall:
    """Decodes a request; `limits` bound lists and maps before they are parsed, and the id.

    Raises:
        InvalidRequest: naming the tensor or the parameter, its value and its limit.
    """
    # The id names answers, not requests: several in flight may share it.
    most = limits.max_request_id_length
    if len(message.id) > most:
        raise InvalidRequest("id", message.id, f"must have at most {most} characters")
    request = pb.GenerateRequest(model=message.model_name, text=_text(message))
    for output in message.outputs:
        if output.name != TEXT_OUTPUT:
            raise InvalidRequest("outputs", output.name, f"the only output is {TEXT_OUTPUT}")
    wants_empty_final = False
    for name, parameter in message.parameters.items():
        value = _value(name, parameter)
        if name == EMPTY_FINAL:
            wants_empty_final = _checked(name, value, bool, "must be a truth value")
        elif name == _TIMEOUT:
            microseconds = _checked(name, value, int, "must be a number of microseconds")
            if microseconds:
                request.timeout_seconds = microseconds / _MICROSECONDS
        else:
            _set(request, name, value, limits)
    return InferCall(message.id, request, wants_empty_final)


def check_version(version: str) -> None:
    """Refuses unknown versions.

    Raises:
        InvalidRequest: naming it.
    """
    if version not in ("", VERSION):
        raise InvalidRequest("model_version", version, f"the only version is {VERSION}")


def renamed(error: InvalidRequest) -> InvalidRequest:
    """The same error, with the field's name in this protocol."""
    part, _, name = error.field.partition(".")
    if part in _PARTS and name:
        field = f"parameters.{name}"
    elif error.field in _OWN:
        field = f"parameters.{error.field}"
    elif error.field.startswith("prompt"):
        field = TEXT_INPUT
    else:
        return error
    return type(error)(field, error.value, error.limit)


def encode_infer(
    model: str, request_id: str, texts: Iterable[str], parameters: Mapping[str, str | int | bool] | None = None
) -> oip.ModelInferResponse:
    """An answer: a text for each output, and parameters."""
    encoded = [text.encode() for text in texts]
    response = oip.ModelInferResponse(model_name=model, model_version=VERSION, id=request_id)
    if encoded:
        response.outputs.add(name=TEXT_OUTPUT, datatype=BYTES, shape=[len(encoded)])
        response.raw_output_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in encoded))
    for name, value in (parameters or {}).items():
        parameter = response.parameters[name]
        match value:
            case bool():
                parameter.bool_param = value
            case int():
                parameter.int64_param = value
            case _:
                parameter.string_param = value
    return response


def finish_reasons(reasons: Iterable[FinishReason]) -> str:
    """The finish reasons of outputs, one word each."""
    return ",".join(str(reason) for reason in reasons)


def metadata(model: str) -> oip.ModelMetadataResponse:
    """The tensors of every text model."""
    response = oip.ModelMetadataResponse(name=model, versions=[VERSION], platform="onward_onnxruntime")
    response.inputs.add(name=TEXT_INPUT, datatype=BYTES, shape=[1])
    # `n` or `num_hypotheses`.
    response.outputs.add(name=TEXT_OUTPUT, datatype=BYTES, shape=[-1])
    return response


def _text(message: oip.ModelInferRequest) -> str:
    names = [tensor.name for tensor in message.inputs]
    if names.count(TEXT_INPUT) != 1:
        raise InvalidRequest("inputs", names, f"must have {TEXT_INPUT} once")
    for tensor in message.inputs:
        if tensor.name != TEXT_INPUT:
            raise InvalidRequest("inputs", tensor.name, f"the only input is {TEXT_INPUT}")
        if tensor.datatype != BYTES:
            raise InvalidRequest(f"{TEXT_INPUT}.datatype", tensor.datatype, f"must be {BYTES}")
        if list(tensor.shape) not in _SHAPES:
            raise InvalidRequest(f"{TEXT_INPUT}.shape", list(tensor.shape), "must be [1]: one text a request")
    data = _bytes(message)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(TEXT_INPUT, data[:32], "must be UTF-8") from error


def _bytes(message: oip.ModelInferRequest) -> bytes:
    (tensor,) = message.inputs
    raw = message.raw_input_contents
    if not raw:
        fields = [field.name for field, _ in tensor.contents.ListFields()]
        if fields != ["bytes_contents"] or len(tensor.contents.bytes_contents) != 1:
            raise InvalidRequest(f"{TEXT_INPUT}.contents", fields, "must have one entry in bytes_contents")
        return tensor.contents.bytes_contents[0]
    if tensor.HasField("contents"):
        raise InvalidRequest("raw_input_contents", len(raw), "must be empty where tensors have contents")
    if len(raw) != 1:
        raise InvalidRequest("raw_input_contents", len(raw), "must have one entry for each input")
    (data,) = raw
    length = struct.unpack_from("<I", data)[0] if len(data) >= _LENGTH_BYTES else -1
    if length != len(data) - _LENGTH_BYTES:
        limit = f"must be one text behind its length in {_LENGTH_BYTES} bytes"
        raise InvalidRequest("raw_input_contents", f"{len(data)} bytes", limit)
    return data[_LENGTH_BYTES:]


def _value(name: str, parameter: oip.InferParameter) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise InvalidRequest(f"parameters.{name}", None, "must have a value")
    return getattr(parameter, choice)


def _checked(name: str, value: Any, kind: type, limit: str) -> Any:
    if type(value) is not kind:
        raise InvalidRequest(f"parameters.{name}", value, limit)
    return value


def _set(request: pb.GenerateRequest, name: str, value: Any, limits: RequestLimits) -> None:
    """Sets the field of a parameter."""
    if name not in _FIELDS:
        raise InvalidRequest(f"parameters.{name}", value, f"is none of {', '.join(sorted(_FIELDS))}")
    part, field = _FIELDS[name]
    message: Message = request if part is None else getattr(request, part)
    if field.is_repeated or field.message_type is not None:
        _set_many(message, field, value, limits)
        return
    path = f"parameters.{name}"
    kind, noun = _SCALARS[field.cpp_type]
    if kind is float:
        value = _number(path, value)
    elif type(value) is not kind:
        raise InvalidRequest(path, value, f"must be {noun}")
    try:
        setattr(message, field.name, value)
    except ValueError as error:
        raise InvalidRequest(path, value, "is out of its type's range") from error
    if part is not None:
        getattr(request, part).SetInParent()


def _number(path: str, value: Any) -> float:
    """A number; old clients have no type for fractions, and send text."""
    try:
        if type(value) in (int, float, str):
            return float(value)
    except ValueError:
        pass
    raise InvalidRequest(path, value, "must be a number")


def _set_many(message: Message, field: FieldDescriptor, value: Any, limits: RequestLimits) -> None:
    path = f"parameters.{field.name}"
    most, entry_bytes = {
        "stop": (limits.max_stop_strings, _MAX_CHARACTER_BYTES * limits.max_stop_string_length),
        "stop_token_ids": (limits.max_stop_token_ids, _MAX_NUMBER_BYTES),
        "logit_bias": (limits.max_logit_bias, _MAX_NUMBER_BYTES),
    }.get(field.name, (_MAX_JSON_BYTES, 0))
    max_bytes = max(_MAX_JSON_BYTES, most * entry_bytes)
    if isinstance(value, str) and len(value) > max_bytes:
        raise InvalidRequest(path, f"{len(value)} characters", f"must have at most {max_bytes} as JSON")
    is_map = field.message_type is not None
    limit = "must be a JSON object" if is_map else "must be a JSON list"
    try:
        content = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        content = None
    if field.name == "stop" and isinstance(value, str) and not isinstance(content, list):
        content = [value]  # one text as it is
    if not isinstance(content, dict if is_map else list):
        raise InvalidRequest(path, value, limit)
    if len(content) > most:
        raise InvalidRequest(path, len(content), f"must have at most {most} entries")
    try:
        json_format.ParseDict({field.name: content}, message)
    except (json_format.ParseError, OverflowError) as error:  # a number of hundreds of digits overflows
        raise InvalidRequest(path, value, f"{limit} of its type's entries") from error
