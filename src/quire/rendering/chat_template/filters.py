"""Filters and functions that a template gets in place of those of Jinja and Python, bounded."""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, cast

from jinja2.exceptions import TemplateError

from quire.rendering.chat_template.budget import TemplateLimitError

# Widths, repeat counts and precisions beyond this serve no prompt.
LARGEST_WIDTH = 100_000
_LARGEST_JSON_INDENT = 64
_LONGEST_TIME_FORMAT = 1000
_LONGEST_TEXT = 100_000


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def clock_reader(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        if len(format) > _LONGEST_TIME_FORMAT:
            raise TemplateLimitError("the format of a time is too long")
        return now().strftime(format)

    return strftime_now


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > _LARGEST_JSON_INDENT:
        raise TemplateLimitError(f"`tojson` indents by {_LARGEST_JSON_INDENT} at most")
    if separators is not None and sum(map(len, separators)) > _LARGEST_JSON_INDENT:
        raise TemplateLimitError("the separators of `tojson` are too long")
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def bounded_arguments(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        check_widths(name, args[1:])
        check_widths(name, tuple(kwargs.values()))
        return function(*args, **kwargs)

    # Jinja reads from the function which context argument it wants.
    bounded.__dict__.update(function.__dict__)
    return bounded


def check_widths(name: str, args: tuple[Any, ...]) -> None:
    for value in args:
        if isinstance(value, int) and abs(value) > LARGEST_WIDTH:
            raise TemplateLimitError(f"`{name}` was asked for a width of {value}")


def bounded_text(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            num_items = (
                len(cast("str", value)) if isinstance(value, str | list | tuple | dict) else 0
            )
            if num_items > _LONGEST_TEXT:
                raise TemplateLimitError(f"`{name}` was given a text of {num_items} characters")
        return function(*args, **kwargs)

    bounded.__dict__.update(function.__dict__)
    return bounded


def longest_item(table: Any) -> int:
    items = cast("Iterable[Any]", table.values() if isinstance(table, dict) else table)
    return max((len(item) for item in items if isinstance(item, str)), default=1)
