"""The external weights of an ONNX graph: names, types, shapes, files and offsets.

Reads protobuf's wire format, so that the server needs no ONNX package. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Numbers of fields in onnx.proto.
_MODEL_GRAPH = 7
_GRAPH_INITIALIZER = 5
_DIMS, _DATA_TYPE, _NAME, _EXTERNAL_DATA, _DATA_LOCATION = 1, 2, 8, 13, 14
_KEY, _VALUE = 1, 2
_EXTERNAL = 1
_VARINT, _LONG, _BYTES, _SHORT = 0, 1, 2, 5
_FIXED = {_LONG: 8, _SHORT: 4}


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    """A stored tensor: ONNX's number of its type, and the file and offset in bytes of its data."""

    name: str
    data_type: int
    shape: tuple[int, ...]
    file: str
    offset: int


def external_tensors(graph: bytes) -> tuple[ExternalTensor, ...]:
    """The initializers of an ONNX file that are stored in other files.

    Raises:
        ValueError: when it is no ONNX file.
    """
    return tuple(
        found
        for number, part in _fields(memoryview(graph))
        if number == _MODEL_GRAPH
        for inner, tensor in _fields(_bytes(part))
        if inner == _GRAPH_INITIALIZER and (found := _tensor(_bytes(tensor))) is not None
    )


def _tensor(data: memoryview) -> ExternalTensor | None:
    name, data_type, location = "", 0, 0
    shape: list[int] = []
    places: dict[str, str] = {}
    for number, value in _fields(data):
        if number == _DIMS:
            shape += [value] if isinstance(value, int) else _packed(value)
        elif number == _DATA_TYPE and isinstance(value, int):
            data_type = value
        elif number == _NAME:
            name = str(_bytes(value), "utf-8")
        elif number == _DATA_LOCATION and isinstance(value, int):
            location = value
        elif number == _EXTERNAL_DATA:
            entry = {inner: str(_bytes(text), "utf-8") for inner, text in _fields(_bytes(value))}
            places[entry.get(_KEY, "")] = entry.get(_VALUE, "")
    if location != _EXTERNAL:
        return None
    return ExternalTensor(name, data_type, tuple(shape), places.get("location", ""), int(places.get("offset", "0")))


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Numbers and values of a message's fields."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        value: int | memoryview
        if kind == _VARINT:
            value, place = _varint(data, place)
        else:
            if kind == _BYTES:
                size, place = _varint(data, place)
            elif kind in _FIXED:
                size = _FIXED[kind]
            else:
                raise ValueError(f"a field is of kind {kind}")
            value, place = data[place : place + size], place + size
        if place > len(data):
            raise ValueError("a field goes beyond the end")
        yield key >> 3, value


def _packed(data: memoryview) -> Iterator[int]:
    place = 0
    while place < len(data):
        value, place = _varint(data, place)
        yield value


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for position, byte in enumerate(data[place : place + 10]):
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value, place + position + 1
    raise ValueError("a number has no end")


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number stands in the place of bytes")
    return value
