"""The settings of schema.py as a table, for `vitray settings` and docs/settings.md.

Meanings come from the fields' docstrings, types and bounds from pydantic's JSON schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from configs.schema import AppConfig

_TYPES = {"integer": "integer", "number": "number", "boolean": "true, false", "string": "text", "object": "mapping"}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥"}
_UNITS = ((1024**3, "GiB"), (1024**2, "MiB"))


@dataclass(frozen=True)
class Setting:
    """A row of the table: one key below `args:`, such as `encoder_replica.num_gpus`."""

    key: str
    values: str
    default: str
    meaning: str


def settings() -> Iterator[Setting]:
    """Yields the settings that hold a value, in the schema's order."""
    schema = AppConfig.model_json_schema()
    yield from _settings(schema, schema["$defs"], "")


def _settings(section: dict[str, Any], sections: dict[str, Any], prefix: str) -> Iterator[Setting]:
    for name, field in section["properties"].items():
        if "$ref" in field:
            yield from _settings(sections[field["$ref"].rpartition("/")[2]], sections, f"{prefix}{name}.")
        else:
            meaning = " ".join(field.get("description", "").split())
            yield Setting(prefix + name, _describe_values(field), _to_yaml(name, field["default"]), meaning)


def _describe_values(schema: dict[str, object]) -> str:
    """Returns the allowed values in words, such as `"auto" or number ≥ 0`."""
    options = schema.get("anyOf")
    if isinstance(options, list):
        return " or ".join(_describe_values(option) for option in options if option != {"type": "null"})
    if "const" in schema:
        return f'"{schema["const"]}"'
    allowed = schema.get("enum")
    if isinstance(allowed, list):
        return ", ".join(f'"{value}"' for value in allowed)
    members = schema.get("prefixItems")
    if isinstance(members, list):
        return f"[{', '.join(_describe_values(member) for member in members)}]"
    items = schema.get("items")
    if isinstance(items, dict):
        return f"list of {_describe_values(items)}"
    bounds = [f" {sign} {schema[bound]:g}" for bound, sign in _BOUNDS.items() if bound in schema]
    return _TYPES[str(schema["type"])] + "".join(bounds)


def _to_yaml(name: str, value: object) -> str:
    """Returns `value` as YAML; bytes also in MiB or GiB."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_to_yaml('', item) for item in value)}]"
    if name.endswith("_bytes") and isinstance(value, int):
        return next((f"{value} ({value // size} {unit})" for size, unit in _UNITS if value % size == 0), str(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
