"""What an answer's form is asked by, in OpenAI's and in vLLM's names: one field of them sets `structured_output`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from onward.v1 import generation_pb2 as pb
from service.errors import InvalidRequest, UnsupportedFeature
from service.transport.http.bodies import MAX_SCHEMA_DEPTH, nests_deeper
from service.transport.http.fields import refuse_others, set_field, set_text, take

VLLM = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's fields; those of its releases before 0.12 have a form each."""
_ROOT = "structured_output"
# vLLM's forms, and ours.
_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice.texts", "grammar": "grammar"}
_SCHEMA_FIELDS = ("name", "schema", "strict", "description")
# Of what a response repeats.
_MAX_CHARACTERS = 4096
_ANY_OBJECT = '{"type": "object"}'

Names = dict[str, str]
"""Paths of our fields, and what they are called where the request has them."""


def set_form(request: pb.GenerateRequest, values: Mapping[str, Any], place: str, format_: Any) -> Names:
    """Sets what outputs must be.

    Args:
        request: the message.
        values: of the request, which may have vLLM's fields.
        place: where OpenAI's field is; in chat its schema has an object of its own.
        format_: that field's value.

    Returns:
        The names by which errors call the form.

    Raises:
        InvalidRequest, UnsupportedFeature: naming a field that is wrong, or the second of two forms.
    """
    forms: dict[str, tuple[str, Any]] = {}
    if (asked := _of_openai(place, format_)) is not None:
        forms[asked[0]] = ("json_schema", asked[1])
    several = take(values, "structured_outputs", dict, "an object") or {}
    refuse_others(several, (*_KINDS, "json_object"), {}, ("structural_tag",), "structured_outputs")
    for name, kind in _KINDS.items():
        for field, value in (
            (f"structured_outputs.{name}", several.get(name)),
            (f"guided_{name}", values.get(f"guided_{name}")),
        ):
            if value is not None:
                forms[field] = (kind, value)
    if take(several, "json_object", bool, "true or false"):
        forms["structured_outputs.json_object"] = ("json_schema", _ANY_OBJECT)
    if len(forms) > 1:
        first, second, *_ = forms
        raise InvalidRequest(second, "set", f"must not be set with {first}")
    for field, (kind, value) in forms.items():
        if kind == "json_schema":
            set_text(request.structured_output, kind, _schema(field, value), field)
        else:
            set_field(request, f"{_ROOT}.{kind}", field, value)
        return {_ROOT: field, f"{_ROOT}.{kind}": field, f"{_ROOT}.{kind.partition('.')[0]}": field}
    return {}


def _of_openai(place: str, value: Any) -> tuple[str, Any] | None:
    """Where the schema of OpenAI's field is, and the schema; None where the field asks for text."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest(place, value, "must be an object")
    match value.get("type"):
        case "text" | "json_object" as kind:
            refuse_others(value, ("type",), {}, (), place)
            return None if kind == "text" else (place, _ANY_OBJECT)
        case "json_schema" if place == "response_format":
            refuse_others(value, ("type", "json_schema"), {}, (), place)
            own, place = take(value, "json_schema", dict, "an object") or {}, f"{place}.json_schema"
            refuse_others(own, _SCHEMA_FIELDS, {}, (), place)
        case "json_schema":
            refuse_others(value, ("type", *_SCHEMA_FIELDS), {}, (), place)
            own = value
        case other:
            raise UnsupportedFeature(f"{place}.type", f"must be text, json_object or json_schema, not {other!r:.40}")
    if not isinstance(own.get("name"), str) or not own["name"]:
        raise InvalidRequest(f"{place}.name", own.get("name"), "must be a string, not empty")
    for field in ("name", "description"):
        if place == "text.format" and isinstance(own.get(field), str) and len(own[field]) > _MAX_CHARACTERS:
            raise InvalidRequest(
                f"{place}.{field}", f"{len(own[field])} characters", f"must have at most {_MAX_CHARACTERS}"
            )
    # The schema is followed whether the request is strict or not.
    for field, kind, noun in (("strict", bool, "true or false"), ("description", str, "a string")):
        if own.get(field) is not None and type(own[field]) is not kind:
            raise InvalidRequest(f"{place}.{field}", own[field], f"must be {noun}")
    if not isinstance(own.get("schema"), dict):
        raise InvalidRequest(f"{place}.schema", own.get("schema"), "must be an object")
    return f"{place}.schema", own["schema"]


def _schema(field: str, value: Any) -> str:
    """A schema's text; vLLM takes it as text, too."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise InvalidRequest(field, value, "must be a JSON schema: an object")
    if nests_deeper(value, MAX_SCHEMA_DEPTH):
        raise InvalidRequest(field, "a schema", f"must nest at most {MAX_SCHEMA_DEPTH} deep")
    return json.dumps(value, ensure_ascii=False)
