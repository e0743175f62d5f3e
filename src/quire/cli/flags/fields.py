"""Flags made from the fields of a settings dataclass, so that a setting is described once.

A field's `metadata` holds `help`, and where they apply `choices`, `kind` (bytes or count) and
`repeats` (the flag adds to what it was given before).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field
from typing import Any

__all__ = ["add_field_flags", "as_flag", "given_fields"]

_NUMBERS = {"int": int, "float": float}


def add_field_flags(
    group: Any,
    items: Iterable[Field[Any]],
    prefix: str,
    spellings: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """A flag for each field. prefix: of the names under which `given_fields` finds the values
    again. spellings: further flags by field name."""
    for item in items:
        names = (as_flag(item.name), *(spellings or {}).get(item.name, ()))
        group.add_argument(*names, **_arguments(item, prefix))


def given_fields(options: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """The values that were given, by field name, several as a tuple; what was not given is left
    out."""
    return {
        name.removeprefix(prefix): tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name.startswith(prefix)
    }


def as_flag(name: str) -> str:
    """`--max-model-len` of `max_model_len`."""
    return "--" + name.replace("_", "-")


def _arguments(item: Field[Any], prefix: str) -> dict[str, Any]:
    """What argparse is told about a field."""
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
        metavar = "{" + ",".join(rules["choices"]) + "}"
    elif "kind" in rules:
        metavar = "SIZE" if rules["kind"] == "bytes" else "COUNT"
    return {**common, "metavar": metavar}
