"""Flags made from the fields of a settings dataclass, so that a setting is described once.

A field's `metadata` holds `help`, and where they apply `choices`, `kind` (bytes, count or
object) and `repeats` (the flag adds to what it was given before).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field
from typing import Any, cast

from quire.base.errors import ConfigError

__all__ = ["add_field_flags", "as_flag", "given_fields"]

_NUMBERS = {"int": int, "float": float}


def add_field_flags(
    group: Any,
    items: Iterable[Field[Any]],
    prefix: str,
    spellings: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Add a flag for each field. prefix: start of the names under which `given_fields` finds the
    values again. spellings: further flags by field name."""
    for item in items:
        names = (as_flag(item.name), *(spellings or {}).get(item.name, ()))
        group.add_argument(*names, **_arguments(item, prefix))


def given_fields(options: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """Return the values that were given, by field name, several as a tuple. Others are left out."""
    found = {
        name.removeprefix(prefix): value
        for name, value in vars(options).items()
        if name.startswith(prefix)
    }
    return {
        name: _listed(name, cast("list[Any]", value)) if isinstance(value, list) else value
        for name, value in found.items()
    }


def _listed(name: str, values: list[Any]) -> tuple[Any, ...]:
    """Several values; vLLM's spelling, one JSON list, gives its items."""
    found: list[Any] = []
    for value in values:
        if not (isinstance(value, str) and value.startswith("[")):
            found.append(value)
            continue
        try:
            items = json.loads(value)
        except ValueError:
            raise ConfigError(
                f"{as_flag(name)} is {value[:80]!r}, which begins like a JSON list and is none. "
                'Give the values one after the other, or a list such as \'["a", "b"]\'.'
            ) from None
        found.extend(str(item) for item in items)
    return tuple(found)


def as_flag(name: str) -> str:
    """`--max-model-len` of `max_model_len`."""
    return "--" + name.replace("_", "-")


def _arguments(item: Field[Any], prefix: str) -> dict[str, Any]:
    """Return argparse's arguments for a field."""
    rules, kind = item.metadata, str(item.type).split(" | ")[0]
    common: dict[str, Any] = {"dest": prefix + item.name, "default": argparse.SUPPRESS}
    if kind == "bool":
        return {**common, "action": argparse.BooleanOptionalAction, "help": rules["help"]}
    is_stated = item.default not in (None, "auto", "", (), MISSING)
    stated = f" ({item.default})" if is_stated else ""
    common["help"] = (rules["help"] + stated).replace("%", "%%")
    if kind.startswith("tuple"):
        of = {"type": float} if "float" in kind else {}
        how = {"action": "extend"} if rules.get("repeats") else {}
        return {**common, **of, **how, "nargs": "+", "metavar": "VALUE"}
    if kind in _NUMBERS and "kind" not in rules:
        common["type"] = _NUMBERS[kind]
    metavar = kind.upper()
    if "choices" in rules:
        metavar = "{" + ",".join(map(str, rules["choices"])) + "}"
    elif "kind" in rules:
        metavar = {"bytes": "SIZE", "count": "COUNT", "object": "JSON"}[rules["kind"]]
    return {**common, "metavar": metavar}
