"""Checks plain data against a JSON Schema: the keywords that report_schema.json uses, and in words a person can act on.

A schema says the shape once; readers that trust it need no checks of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["KEYWORDS", "first_problem"]

KEYWORDS = frozenset(
    [
        "$ref",
        "additionalProperties",
        "anyOf",
        "const",
        "enum",
        "items",
        "minimum",
        "pattern",
        "properties",
        "required",
        "type",
    ]
)
"""The keywords that are checked. Others are notes to a reader."""

_BITS = 64  # numbers beyond are nothing that was measured, and too long to print

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}

_Problem = tuple[tuple[str | int, ...], str]  # where, and what


def first_problem(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Say where `value` first differs from `schema`, and how; None: it fits.

    Stricter than the standard in numbers: they are finite and fit 64 bits, and an integer is written without a point.
    """
    problem = next(_problems(value, schema, schema, ()), None)
    if problem is None:
        return None
    path, text = problem
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
    return f"{where}: {text}" if where else text


def _problems(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], path: tuple[str | int, ...]
) -> Iterator[_Problem]:
    if "$ref" in schema:
        yield from _problems(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, path)
    if "anyOf" in schema:
        found = [next(_problems(value, choice, root, path), None) for choice in schema["anyOf"]]
        if None not in found:  # the choice that fits furthest is the one that was meant
            yield max((problem for problem in found if problem), key=lambda problem: len(problem[0]))
    if "const" in schema and value != schema["const"]:
        yield path, f"expected {schema['const']!r}, found {_shown(value)}"
    if "enum" in schema and value not in schema["enum"]:
        yield path, f"expected one of {', '.join(schema['enum'])}, found {_shown(value)}"
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_TYPES[name](value) for name in types):
        yield path, f"expected {' or '.join(types)}, found {_shown(value)}"
    elif isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield path, f"{_shown(value)} is not of the form {schema['pattern']}"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from ((path, text) for text in _number(value, schema))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _problems(item, schema.get("items", {}), root, (*path, number))
    elif isinstance(value, dict):
        yield from _object(value, schema, root, path)


def _number(value: int | float, schema: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{value} is no finite number"
    elif isinstance(value, int) and value.bit_length() > _BITS:
        yield f"the number does not fit {_BITS} bits"
    elif value < schema.get("minimum", value):
        yield f"expected {schema['minimum']} or more, found {value}"


def _object(
    value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], path: tuple[str | int, ...]
) -> Iterator[_Problem]:
    for name in schema.get("required", ()):
        if name not in value:
            yield path, f"{name!r} is missing"
    known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    for name, item in value.items():
        if name not in known and others is False:
            yield path, f"{_shown(name)} is not known here"
        else:
            yield from _problems(item, known.get(name, others), root, (*path, name))


def _shown(value: Any) -> str:
    """Show a value briefly; of large ones only what they are."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
