"""Checks the data of a saved report against report_schema.json, and says in words a person can act on what is wrong.

Imported only when a saved report is read: jsonschema is not light.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import extend

__all__ = ["problem_of"]

_BITS = 64  # numbers beyond are nothing that was measured, and too long to print


def problem_of(data: Any, schema: Mapping[str, Any]) -> str | None:
    """Say where `data` differs most from `schema`, and how; None: it fits.

    Stricter than the standard in numbers: they are finite and fit 64 bits, and an integer is written without a point.
    """
    error = best_match(_Validator(schema).iter_errors(data))
    if error is None:
        return None
    where = error.json_path.removeprefix("$").removeprefix(".")
    return f"{where}: {_sentence(error)}" if where else _sentence(error)


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
