"""Filters and functions that a template gets in place of those of Jinja and Python, bounded."""

import json
from collections.abc import Callable, ItemsView, Iterable, KeysView, Sized, ValuesView
from datetime import datetime
from typing import Any, cast

from jinja2.exceptions import TemplateError
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter
from jinja2.utils import pass_context

from quire.text.rendering.chat_template.budget import TemplateLimitError, listed, spend, take_null
from quire.text.rendering.chat_template.sizes import walk

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
# Steps per character, for filters and methods that take longer than a copy.
_TEXT_COSTS = {
    "capitalize": 1 / 64, "casefold": 1 / 64, "e": 1 / 16, "escape": 1 / 16, "expandtabs": 1 / 16,
    "forceescape": 1 / 16, "indent": 1 / 8, "lower": 1 / 64, "replace": 1 / 64,
    "split": 1 / 16, "rsplit": 1 / 16, "splitlines": 1 / 16, "striptags": 2, "swapcase": 1 / 64,
    "title": 1, "translate": 1 / 4, "upper": 1 / 64, "urlencode": 1 / 2, "urlize": 2,
    "wordcount": 1 / 8, "wordwrap": 8, "xmlattr": 1 / 16,
}  # fmt: skip
# Steps per item, beyond those that going through the items takes.
_LIST_COSTS = {"dictsort": 4, "groupby": 4, "max": 2, "min": 2, "sort": 4, "unique": 2}
_JSON_CHARACTERS_PER_STEP = 32
# With an indent the JSON is made by Python code.
_INDENTED_JSON_CHARACTERS_PER_STEP = 8
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
        spend_json(context, value)
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


def spend_text(context: Context, name: str, text: str) -> None:
    """For a filter or method that goes through a text."""
    spend(context, int(len(text) * _TEXT_COSTS.get(name, 0)))


def spend_json(context: Context, value: Any, *, is_indented: bool = False) -> None:
    """For what is written as JSON."""
    size = walk(value, lambda num_steps: spend(context, num_steps))
    per_step = _INDENTED_JSON_CHARACTERS_PER_STEP if is_indented else _JSON_CHARACTERS_PER_STEP
    spend(context, size // per_step)


def text_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of texts, given the text of whatever it is applied to."""

    @pass_context
    def of_text(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        text = value if isinstance(value, Undefined) else text_of(context, value)
        spend_text(context, name, str(text))
        return function(*_passed(function, context), text, *args, **kwargs)

    return of_text


def list_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of lists, given an empty one for null."""

    @pass_context
    def of_list(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        items = listed(context, value)
        if isinstance(items, str):
            spend_text(context, name, items)
        elif name in _LIST_COSTS:
            # The length of an iterator shows only when its items are there.
            items = items if isinstance(items, Sized) else list(cast("Iterable[Any]", items))
            spend(context, len(items) * _LIST_COSTS[name])
        return function(*_passed(function, context), items, *args, **kwargs)

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
        """Format a field, as `str.format` does for texts and numbers."""
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


@pass_context
def to_json(
    context: Context,
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
    spend_json(context, x, is_indented=indent is not None)
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
