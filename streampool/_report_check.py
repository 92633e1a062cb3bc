"""Checks saved reports and snapshots against report_schema.json, and says in words a person can act on what is wrong.

Imported only when one is read: jsonschema is not light.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import extend

__all__ = ["checked", "problem_of"]

_BITS = 64  # numbers beyond are nothing that was measured, and too long to print
_DEPTH = 100  # what is nested deeper may be read, but not shown


def checked(text: str, schema_id: str, rules: Mapping[str, Any]) -> dict[str, Any]:
    """Give the data of a JSON text that names `schema_id`, of the shape that `rules` say.

    Raises
    ------
    ValueError
        It names another schema, or is damaged: says where it is not as it should be. ``json.JSONDecodeError`` where it
        is no JSON at all.
    """
    try:
        data = json.loads(text)
        found = data.get("schema") if isinstance(data, dict) else None
        if found != schema_id:
            what = "none" if found is None else ascii(found)[:80]
            raise ValueError(f"expected schema {schema_id}, found {what}")
        problem = problem_of(data, rules) or _unshowable(data)
    except RecursionError:
        problem = _TOO_DEEP
    if problem is not None:
        raise ValueError(problem)
    return dict(data)


def problem_of(data: Any, schema: Mapping[str, Any]) -> str | None:
    """Say where `data` differs most from `schema`, and how; None: it fits.

    Stricter than the standard in numbers: they are finite and fit 64 bits, and an integer is written without a point.
    """
    error = best_match(_Validator(schema).iter_errors(data))
    if error is None:
        return None
    where = error.json_path.removeprefix("$").removeprefix(".")
    return f"{where}: {_sentence(error)}" if where else _sentence(error)


_TOO_DEEP = "the JSON is nested too deeply"


def _unshowable(data: dict[str, Any]) -> str | None:
    """Look also where the schema allows anything: say what could not be written again."""
    level: list[Any] = [data]
    for _ in range(_DEPTH):
        inner: list[Any] = []
        for outer in level:
            for value in outer.values() if isinstance(outer, dict) else outer:
                if isinstance(value, dict | list):
                    inner.append(value)
                elif isinstance(value, float) and not math.isfinite(value):
                    return f"{value} is no finite number"
        if not inner:
            return None
        level = inner
    return _TOO_DEEP


def _is_integer(_: object, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= _BITS


def _is_number(_: object, value: object) -> bool:
    return math.isfinite(value) if isinstance(value, float) else _is_integer(_, value)


_Validator = extend(  # type: ignore[no-untyped-call]  # the stubs say nothing of it
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine_many({"integer": _is_integer, "number": _is_number}),
)


def _sentence(error: ValidationError) -> str:
    """Say what is wrong, for each keyword that the schema uses."""
    value: Any = error.instance
    wanted: Any = error.validator_value
    rules: Any = error.schema
    match error.validator:
        case "required":
            return f"{next(name for name in wanted if name not in value)!r} is missing"
        case "additionalProperties":
            return f"{_shown(next(name for name in value if name not in rules['properties']))} is not known here"
        case "type":
            return _wrong_type(value, [wanted] if isinstance(wanted, str) else wanted)
        case "const":
            return f"expected {wanted!r}, found {_shown(value)}"
        case "enum":
            return f"expected one of {', '.join(wanted)}, found {_shown(value)}"
        case "minimum":
            return f"expected {wanted} or more, found {value}"
        case "pattern":
            return f"{_shown(value)} is not of the form {wanted}"
        case _:
            return error.message


def _wrong_type(value: Any, wanted: list[str]) -> str:
    if "integer" in wanted or "number" in wanted:
        if isinstance(value, int) and value.bit_length() > _BITS:
            return f"the number does not fit {_BITS} bits"
        if "number" in wanted and isinstance(value, float):
            return f"{value} is no finite number"
    return f"expected {' or '.join(wanted)}, found {_shown(value)}"


def _shown(value: Any) -> str:
    """Show a value briefly; of large ones only what they are."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
