"""Limits how much a request holds, by its bytes: nothing is built of a message that holds too much.

A few megabytes can encode millions of elements, and a parser builds all of them before any limit can be checked. This
module walks the wire format (https://protobuf.dev/programming-guides/encoding) and counts entries of repeated fields,
and fields of all kinds. Strings and bytes are not counted: each costs one copy, whatever its length.

Messages of up to `FREE` bytes are not walked, and up to `FREE` entries of any repeated field pass: they are built in a
few milliseconds. `transport.codec` checks lower limits of the operator. Repeated fields that may hold more are listed
in `long_fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor import FieldDescriptor as _Type
from google.protobuf.message import DecodeError

from service.config import RequestLimits
from service.errors import InvalidRequest, PromptTooLong
from service.repository.entry import Models

FREE = 4096
"""Bytes of a message, and entries of any field, that are not checked."""
MAX_FIELDS = 4 * FREE
"""Most fields in one message besides the entries of `sampling.logit_bias`, which have three each."""
_MAP_ENTRY_FIELDS = 3
# One step blocks the event loop: fields, and bytes of a packed list.
_STEP_FIELDS = 512
_STEP_BYTES = 64 << 10

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10
_MAX_TAG = (1 << 32) - 1
# The highest bit of a varint's byte is set if another follows.
_CONTINUES = 0x80
_CONTINUED = bytes(range(_CONTINUES, 0x100))
_WIRE_TYPES: Mapping[int, int] = {
    **dict.fromkeys((_Type.TYPE_DOUBLE, _Type.TYPE_FIXED64, _Type.TYPE_SFIXED64), _FIXED64),
    **dict.fromkeys((_Type.TYPE_FLOAT, _Type.TYPE_FIXED32, _Type.TYPE_SFIXED32), _FIXED32),
    **dict.fromkeys((_Type.TYPE_STRING, _Type.TYPE_BYTES, _Type.TYPE_MESSAGE), _DELIMITED),
}
# Paths of its fields are those of the inner request.
_TRANSPARENT = "onward.v1.EstimateRequest.request"


@dataclass(frozen=True, slots=True)
class Limit:
    """Most entries of a repeated field.

    Args:
        most: read for each message with more than `FREE`, since models come and go.
        error: raised for more.
        unit: of the entries, in the message.
    """

    most: Callable[[], int]
    error: type[InvalidRequest] = InvalidRequest
    unit: str = "entries"


_COMMON = Limit(lambda: FREE)


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a request. `limit` is set for a repeated field; `fields`, by number, for a message."""

    path: str
    wire_type: int
    limit: Limit | None
    fields: Mapping[int, _Field] | None


class WireLimits:
    """Refuses requests by their bytes.

    Args:
        services: full names of the services whose requests it checks.
        long_fields: limits of repeated fields by full name; `FREE` for others.
        max_fields: most fields of one message.
    """

    def __init__(
        self, services: Collection[str], long_fields: Mapping[str, Limit], max_fields: int = MAX_FIELDS
    ) -> None:
        self._max_fields = max_fields
        self._requests: dict[str, Mapping[int, _Field]] = {}
        for name in services:
            for method in descriptor_pool.Default().FindServiceByName(name).methods:
                self._requests[f"{name}/{method.name}"] = _fields(method.input_type, "", long_fields)

    def check(self, path: str, data: bytes) -> Iterator[None]:
        """Refuses a request that holds too much to be built; in steps of at most about a millisecond.

        `path` is the method's, as in "onward.v1.GenerationService/Generate".

        Raises:
            InvalidRequest: naming a field and its limit; also for bytes that are no message.
        """
        if len(data) > FREE:
            try:
                yield from _walk(data, self._requests[path], self._max_fields)
            except (IndexError, _Malformed) as error:
                raise _malformed(data) from error


def parse(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    """A message of a method's type.

    Raises:
        InvalidRequest: for bytes that are none.
    """
    try:
        return deserialize(data)
    except DecodeError as error:
        raise _malformed(data) from error


def _malformed(data: bytes) -> InvalidRequest:
    return InvalidRequest("request", f"{len(data)} bytes", "must be a message of the method's type")


def request_limits(services: Collection[str], limits: RequestLimits, models: Models) -> WireLimits:
    """The limits of all requests to these services; contexts and vocabularies of `models` bound lists of token ids."""

    def context() -> int:
        configs = [models.resolve(name).manifest.config for name in models.names]
        return max((max(each.context, each.source_context) for each in configs), default=FREE)

    def vocabulary() -> int:
        return max((models.resolve(name).manifest.config.vocab_size for name in models.names), default=FREE)

    long_fields = {
        "onward.v1.TokenIds.ids": Limit(context, PromptTooLong, "tokens"),
        "onward.v1.SamplingParams.allowed_token_ids": Limit(vocabulary),
        "onward.v1.SamplingParams.logit_bias": Limit(lambda: limits.max_logit_bias),
        "onward.v1.StoppingParams.stop": Limit(lambda: limits.max_stop_strings),
        "onward.v1.StoppingParams.stop_token_ids": Limit(lambda: limits.max_stop_token_ids),
        "onward.v1.DetokenizeRequest.token_ids": Limit(lambda: limits.max_detokenize_tokens),
    }
    return WireLimits(services, long_fields, MAX_FIELDS + _MAP_ENTRY_FIELDS * limits.max_logit_bias)


class _Malformed(Exception):
    """The bytes are no message."""


def _fields(kind: Descriptor, prefix: str, long_fields: Mapping[str, Limit]) -> Mapping[int, _Field]:
    """A message's fields by number; no message of ours contains itself."""
    found = {}
    for field in kind.fields:
        group = field.containing_oneof
        # An `optional` field has a oneof of its own, which begins with "_".
        name = f"{group.name}.{field.name}" if group is not None and group.name[0] != "_" else field.name
        path = f"{prefix}{name}"
        inner = "" if field.full_name == _TRANSPARENT else f"{path}."
        found[field.number] = _Field(
            path=path,
            wire_type=_WIRE_TYPES.get(field.type, _VARINT),
            limit=long_fields.get(field.full_name, _COMMON) if field.is_repeated else None,
            fields=_fields(field.message_type, inner, long_fields) if field.message_type else None,
        )
    return found


def _walk(data: bytes, fields: Mapping[int, _Field], max_fields: int) -> Iterator[None]:
    """Counts fields and entries, and yields between steps.

    Raises:
        InvalidRequest: for a count above its limit.
        _Malformed, IndexError: when the bytes are no message.
    """
    counts: dict[str, int] = {}
    limits: dict[str, int] = {}
    outer: list[tuple[int, Mapping[int, _Field]]] = []
    at, end, num_fields = 0, len(data), 0
    while True:
        while at >= end:
            if at > end:
                raise _Malformed
            if not outer:
                return
            end, fields = outer.pop()
        # No call for one-byte numbers, which most are.
        tag = data[at]
        if tag < _CONTINUES:
            at += 1
        else:
            tag, at = _varint(data, at)
            if tag > _MAX_TAG:
                raise _Malformed
        wire_type, field = tag & 7, fields.get(tag >> 3)
        num_fields += 1
        if num_fields > max_fields:
            limit = f"the message must have at most {max_fields} fields, lists of numbers packed"
            raise InvalidRequest("request" if field is None else field.path, f"{num_fields} or more", limit)
        if not num_fields % _STEP_FIELDS:
            yield
        start = at
        if wire_type == _DELIMITED:
            length = data[at]
            if length < _CONTINUES:
                start = at + 1
            else:
                length, start = _varint(data, at)
            at = start + length
            if at > end:
                raise _Malformed
        elif wire_type == _VARINT:
            at = at + 1 if data[at] < _CONTINUES else _varint(data, at)[1]
        else:
            # Groups, which have no length, are not part of proto3.
            at += _FIXED_BYTES.get(wire_type, len(data))
        if field is None:
            continue
        if field.limit is not None:
            is_single = wire_type == field.wire_type
            num_entries = 1 if is_single else (yield from _num_packed(field, wire_type, data, start, at))
            _count(counts, limits, field, field.limit, num_entries)
        if field.fields is not None and wire_type == _DELIMITED:
            outer.append((end, fields))
            at, end, fields = start, at, field.fields


def _num_packed(field: _Field, wire_type: int, data: bytes, start: int, end: int) -> Generator[None, None, int]:
    """Entries of a packed repeated field; in steps."""
    if wire_type != _DELIMITED:
        return 0  # a mismatched type: parsers take it for an unknown field
    if field.wire_type != _VARINT:
        return (end - start) // _FIXED_BYTES[field.wire_type]
    num_entries = 0
    for at in range(start, end, _STEP_BYTES):
        num_entries += len(data[at : min(at + _STEP_BYTES, end)].translate(None, _CONTINUED))
        if end - start > _STEP_BYTES:
            yield
    return num_entries


def _count(counts: dict[str, int], limits: dict[str, int], field: _Field, limit: Limit, num_entries: int) -> None:
    """Adds entries of a repeated field; `limits` are those of the message, each read once."""
    count = counts[field.path] = counts.get(field.path, 0) + num_entries
    if count <= FREE:
        return
    if (most := limits.get(field.path)) is None:
        most = limits[field.path] = limit.most()
    if count > most:
        raise limit.error(field.path, f"{count} or more", f"must have at most {most} {limit.unit}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint, and the position after it."""
    value = data[at]
    if value < _CONTINUES:
        return value, at + 1
    value &= 0x7F
    for place in range(1, _MAX_VARINT_BYTES):
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < _CONTINUES:
            return value, at + place + 1
    raise _Malformed
