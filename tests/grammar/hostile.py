"""Grammars that try to cost much, or to be taken for what they are not."""

from __future__ import annotations

from typing import Any

__all__ = ["HOSTILE"]


def deep(count: int) -> str:
    return '{"a":' * count + "1" + "}" * count


def chain(count: int) -> dict[str, Any]:
    refs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**refs, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def zigzag(count: int) -> dict[str, Any]:
    """Definitions in an order in which no pass over them settles many."""
    order = [i // 2 if i % 2 else count - 1 - i // 2 for i in range(count)]
    after = dict(zip(order, [*order[1:], count], strict=True))
    refs = {f"d{i}": {"$ref": f"#/$defs/d{after[i]}"} for i in range(count)}
    return {"$defs": {**refs, f"d{count}": {"type": "null"}}, "$ref": f"#/$defs/d{order[0]}"}


HOSTILE: list[dict[str, Any]] = [
    {"regex": "(a*)*(b|bb)*" * 30 + "((x{1,900}){1,900}){1,900}"},
    {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"json": {"type": "integer", "multipleOf": 999983}},
    {"json": deep(10_000)},
    {"json": '{"not":' * 200_000 + "1" + "}" * 200_000},
    {"json": chain(10_000)},
    {"json": zigzag(3_000)},
    {"json": {"enum": [f"item {i}" for i in range(60_000)]}},
    {"json": {"$ref": "#"}},
    {"json": {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}},
    {"json": {"type": "integer", "maximum": 10**4000}},
    {"json": '{"maximum": 1e99999}'},
    {"json": {"allOf": [{"pattern": f"^(a|b{i}|c+){{1,9}}$"} for i in range(19)]}},
    {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}},
    {"regex": "a\0b"},
    {"json": {"const": "\ud800"}},
    {"choice": ["\udcff"]},
    {"grammar": "start: start start | \"a\""},
    {"grammar": "start: " + " | ".join(f'"{i}"' for i in range(20_000))},
]  # fmt: skip
