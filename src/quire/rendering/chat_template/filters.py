"""Filters and functions that a template gets in place of those of Jinja and Python, bounded."""

import json
from collections.abc import Callable, ItemsView, Iterable, KeysView, ValuesView
from datetime import datetime
from typing import Any, cast

from jinja2.exceptions import TemplateError
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter
from jinja2.utils import pass_context

from quire.rendering.chat_template.budget import TemplateLimitError, listed, take_null

# Widths, repeat counts and precisions beyond this serve no prompt.
LARGEST_WIDTH = 100_000
_LARGEST_JSON_INDENT = 64
_LONGEST_TIME_FORMAT = 1000
_LONGEST_TEXT = 100_000
TEXT_FILTERS = frozenset(
    {"capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "pprint",
     "replace", "safe", "string", "striptags", "title", "trim", "truncate", "upper", "urlize",
     "wordcount", "wordwrap"}
)  # fmt: skip
LIST_FILTERS = frozenset(
    {"batch", "count", "dictsort", "first", "groupby", "items", "join", "last", "length", "list",
     "map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr",
     "slice", "sort", "sum", "unique", "urlencode"}
)  # fmt: skip
_VIEWS = (range, KeysView, ValuesView, ItemsView)


def text_of(context: Context, value: Any) -> str:
    """The text that stands for a value in a prompt: nothing for null, JSON for lists and objects,
    never how Python shows them. TemplateError for what has no text, such as a macro."""
    if isinstance(value, str):
        return value
    if value is None:
        take_null(context)
        return ""
    if isinstance(value, int | float | Undefined):
        return str(value)
    if isinstance(value, list | tuple | dict | range | KeysView | ValuesView | ItemsView):
        return json.dumps(cast("Any", value), ensure_ascii=False, default=_json_value)
    raise _no_text(value)


def _json_value(value: Any) -> Any:
    if isinstance(value, _VIEWS):
        return list(cast("Iterable[Any]", value))
    if isinstance(value, Undefined):
        return None
    raise _no_text(value)


def _no_text(value: object) -> TemplateError:
    hint = " (add `| list`)" if hasattr(value, "__iter__") else ""
    return TemplateError(f"it prints a value of the type {type(value).__name__}, not a text{hint}")


def text_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of texts, given the text of whatever it is applied to."""

    @pass_context
    def of_text(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        text = value if isinstance(value, Undefined) else text_of(context, value)
        return function(*_passed(function, context), text, *args, **kwargs)

    return of_text


def list_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of lists, given an empty one for null."""

    @pass_context
    def of_list(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*_passed(function, context), listed(context, value), *args, **kwargs)

    return of_list


def _passed(function: Callable[..., Any], context: Context) -> tuple[Any, ...]:
    """The argument that Jinja passes to a filter before all others."""
    kind = getattr(function, "jinja_pass_arg", None)
    if kind is None:
        return ()
    return (
        ({"environment": context.environment, "eval_context": context.eval_ctx}).get(
            kind.name, context
        ),
    )


class TextFormatter(SandboxedFormatter):
    """`str.format`, whose fields show texts as they stand in prompts."""

    def __init__(self, context: Context) -> None:
        super().__init__(cast("SandboxedEnvironment", context.environment))
        self._context = context

    def format_field(self, value: Any, format_spec: str) -> str:
        """As `str.format` for texts and numbers."""
        return super().format_field(shown(self._context, value), format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """`!s` gives the text that stands in a prompt."""
        if conversion == "s":
            return text_of(self._context, value)
        return super().convert_field(value, conversion)


def shown(context: Context, value: Any) -> Any:
    """`value`, or its text if it is neither a text nor a number."""
    return value if isinstance(value, str | int | float) else text_of(context, value)


def format_values(context: Context, pattern: str, values: Any) -> Any:
    """The right side of `pattern % values`, each value as it is shown."""
    if isinstance(values, tuple):
        return tuple(shown(context, value) for value in cast("tuple[Any, ...]", values))
    if isinstance(values, dict) and "%(" in pattern:
        named = cast("dict[Any, Any]", values)
        return {key: shown(context, value) for key, value in named.items()}
    return shown(context, values)


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
