"""The settings of schema.py as a table, for `vitray settings` and the README. It must not know what a setting does.

Meanings are the docstrings below the fields, types and bounds those of pydantic's JSON schema: nothing is told twice.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel, TypeAdapter

from configs.schema import AppConfig, section_fields

_TYPES = {"integer": "integer", "number": "number", "boolean": "true, false", "string": "text", "object": "mapping"}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥"}
_UNITS = ((1024**3, "GiB"), (1024**2, "MiB"))


@dataclass(frozen=True)
class Setting:
    """One key below `args:`, such as `encoder_replica.num_gpus`."""

    key: str
    values: str
    default: str
    meaning: str


def settings(section: type = AppConfig, prefix: str = "") -> Iterator[Setting]:
    """Every setting that holds a value, in the order in which the schema lists them."""
    meanings = field_docstrings(section)
    properties = TypeAdapter(section).json_schema()["properties"]
    defaults = _defaults(section)
    for name, annotation in (section_fields(section) or {}).items():
        if isinstance(annotation, type) and section_fields(annotation) is not None:
            yield from settings(annotation, f"{prefix}{name}.")
        else:
            default = _written(name, defaults[name])
            yield Setting(prefix + name, _values(properties[name]), default, meanings.get(name, ""))


def markdown() -> str:
    """The settings as a Markdown table."""
    rows = [f"| `{s.key}` | `{s.default}` | {s.values.replace('|', chr(92) + '|')} | {s.meaning} |" for s in settings()]
    return "\n".join(["| key below `args:` | default | values | |", "|---|---|---|---|", *rows])


def field_docstrings(section: type) -> dict[str, str]:
    """What stands as a string below each field, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found[field.target.id] = " ".join(below.value.value.split())
    return found


def _values(schema: dict[str, object]) -> str:
    """In words: `"auto" or number ≥ 0`."""
    options = schema.get("anyOf")
    if isinstance(options, list):
        return " or ".join(_values(option) for option in options if option != {"type": "null"})
    if "const" in schema:
        return f'"{schema["const"]}"'
    allowed = schema.get("enum")
    if isinstance(allowed, list):
        return ", ".join(f'"{value}"' for value in allowed)
    members = schema.get("prefixItems")
    if isinstance(members, list):
        return f"[{', '.join(_values(member) for member in members)}]"
    items = schema.get("items")
    if isinstance(items, dict):
        return f"list of {_values(items)}"
    bounds = [f" {sign} {schema[bound]:g}" for bound, sign in _BOUNDS.items() if bound in schema]
    return _TYPES[str(schema["type"])] + "".join(bounds)


def _defaults(section: type) -> dict[str, object]:
    if issubclass(section, BaseModel):
        return {name: field.get_default(call_default_factory=True) for name, field in section.model_fields.items()}
    assert dataclasses.is_dataclass(section)
    return {field.name: field.default for field in dataclasses.fields(section)}


def _written(name: str, value: object) -> str:
    """As it would be written in the file."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_written('', item) for item in value)}]"
    if name.endswith("_bytes") and isinstance(value, int):
        return next((f"{value} ({value // size} {unit})" for size, unit in _UNITS if value % size == 0), str(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
