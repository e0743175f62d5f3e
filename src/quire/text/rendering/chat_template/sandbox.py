"""The Jinja environment in which chat templates run. Imports jinja2; loaded when first needed.

Templates come with downloaded models and are code. They run without access to Python internals,
and under limits: steps (loop iterations and calls), wall time, the size of every string that they
build, and that of all values together. The limits stop accidents and simple attacks inside this
process; whoever runs templates of unknown origin should do so in one that can be killed.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sized
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from quire.text.rendering.chat_template.budget import (
    BUDGET,
    COPIED_CHARACTERS_PER_STEP,
    REFUSES_NULL,
    RenderBudget,
    TemplateLimitError,
    TemplateLimits,
    build,
    charged,
    check_bits,
    counted,
    listed,
    measured,
    spend,
    spend_copy,
)
from quire.text.rendering.chat_template.filters import (
    LARGEST_WIDTH,
    LIST_FILTERS,
    TEXT_FILTERS,
    TextFormatter,
    bounded_arguments,
    bounded_text,
    check_widths,
    clock_reader,
    format_values,
    list_filter,
    longest_item,
    make_dict,
    raise_exception,
    spend_text,
    text_filter,
    text_of,
    to_json,
)
from quire.text.rendering.chat_template.sizes import (
    BYTES_PER_PIECE,
    built_bytes,
    int_bits,
    num_formatted,
    split_bytes,
)
from quire.text.rendering.chat_template.tree import (
    BUILT,
    CHARGED,
    CONCATENATED,
    COUNTED,
    LISTED,
    MEASURED,
    PRINTED,
    LimitInserter,
    unknown_names,
)

# Searches from the end compare every place of the text with the whole of what they look for.
_QUADRATIC_METHODS = frozenset(
    {"rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip"}
)
_COMPARED_PER_STEP = 256
# Their time, or what they build, is not in proportion to the text.
_TEXT_FILTERS = ("striptags", "title", "urlize", "wordwrap", "xmlattr")
_WIDTH_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_WIDTH_FILTERS = ("center", "indent", "batch", "slice", "wordwrap", "truncate", "round")


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks text for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 (the name and type that Jinja reads)

    def parse(self, parser: Parser) -> nodes.Node:
        """The body of the tag, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatNamespace(Namespace):
    """`namespace()` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportSelfClsParameterName]
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that counts iterations and calls and refuses oversized strings."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})

    def __init__(
        self,
        limits: TemplateLimits,
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        self._limits = limits
        self._clock = clock
        # Jinja types its tables with bare `dict`.
        variables = cast("dict[str, Any]", self.globals)  # pyright: ignore[reportUnknownMemberType]
        variables.pop("lipsum", None)
        variables["raise_exception"] = raise_exception
        variables["strftime_now"] = clock_reader(now)
        variables["dict"] = make_dict
        variables["namespace"] = ChatNamespace
        filters = cast(
            "dict[str, Callable[..., Any]]",
            self.filters,  # pyright: ignore[reportUnknownMemberType]
        )
        filters["tojson"] = to_json
        filters[COUNTED] = counted
        filters[BUILT] = self._built
        filters[CHARGED] = charged
        filters[MEASURED] = measured
        filters[LISTED] = listed
        filters[PRINTED] = self._printed
        filters[CONCATENATED] = self._concatenated
        filters["format"] = self._format
        filters["sum"] = self._sum
        filters["trim"] = self._trim
        filters["int"] = self._sized_result(filters["int"])
        filters["indent"] = self._bounded_indent(filters["indent"])
        filters["replace"] = self._replace
        filters["join"] = self._bounded_join(filters["join"])
        filters["list"] = self._list
        filters["pprint"] = filters["string"]
        for name in _TEXT_FILTERS:
            filters[name] = bounded_text(name, filters[name])
        for name in _WIDTH_FILTERS:
            filters[name] = bounded_arguments(name, filters[name])
        for name in TEXT_FILTERS:
            filters[name] = text_filter(name, filters[name])
        for name in LIST_FILTERS:
            filters[name] = list_filter(name, filters[name])

    def compiled(self, source: str) -> tuple[jinja2.Template, list[str]]:
        """A template, and what it uses that there is none of, in words.

        Raises TemplateError, or what Python's compiler raises (SyntaxError, RecursionError).
        """
        tree = super()._parse(source, None, None)
        # Jinja types its tables with bare `dict`.
        known = cast("dict[str, dict[str, Any]]", self.__dict__)
        unknown = unknown_names(tree, known["filters"], known["tests"], known["globals"])
        code = self.compile(cast("nodes.Template", LimitInserter().visit(tree)))
        return self.template_class.from_code(self, code, self.make_globals(None)), unknown

    def texts(self, source: str) -> frozenset[str]:
        """Return the texts that a template may compare with others. Errors as in `compiled`."""
        tree = super()._parse(source, None, None)
        return frozenset(
            const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)
        )

    def budget(self, limits: TemplateLimits | None = None) -> RenderBudget:
        """Make the budget of one render, or of several together; by default with the environment's
        limits."""
        return RenderBudget(limits or self._limits, self._clock)

    def render(
        self,
        template: jinja2.Template,
        variables: Mapping[str, Any],
        budget: RenderBudget,
        *,
        refuses_null: bool = False,
    ) -> str:
        """Render within `budget`; TemplateLimitError when it is used up.

        Null has no text and no items. refuses_null: NullUsedError where they are asked for.
        """
        parts: list[str] = []
        num_left = self._limits.max_characters
        for part in template.generate({**variables, BUDGET: budget, REFUSES_NULL: refuses_null}):
            num_left -= len(part)
            if num_left < 0:
                raise self._too_long()
            parts.append(part)
        return "".join(parts)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Count the call, and check what it builds."""
        spend(context, 1)
        if not isinstance(obj, Macro | LoopContext | type):
            for value in (*args, *kwargs.values()):
                measured(context, value)
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "join" and len(args) == 1:
            args = (list(counted(context, args[0])),)
        if isinstance(owner, str | int | list | tuple | dict):
            self._check_method(context, name, owner, (*args, *kwargs.values()))
        return self._built(context, super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse the operators that make small operands huge."""
        if operator == "**" and isinstance(right, int | float) and abs(right) > 64:
            raise TemplateLimitError(f"the exponent {right} is too large")
        if isinstance(left, int) and isinstance(right, int):
            check_bits(int_bits(operator, left, right))
        elif operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(text, Sized):
                    self._check_length(len(text) * max(count, 0))
        elif operator == "%" and isinstance(left, str):
            values = cast("tuple[Any, ...]", right) if isinstance(right, tuple) else (right,)
            self._check_format(context, left, values)
            right = format_values(context, left, right)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            self._check_length(len(left) + len(right))
        result = self._built(context, super().call_binop(context, operator, left, right))
        spend_copy(context, result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's `str.format`, with its widths checked and its values as they are shown."""
        if super().wrap_str_format(value) is None:
            return None
        pattern = str(value.__self__)
        is_map = value.__name__ == "format_map"

        @pass_context
        def checked_format(context: Context, *args: Any, **kwargs: Any) -> str:
            self._check_format(context, pattern, (*args, *kwargs.values()))
            values: Any = kwargs
            if is_map:
                if len(args) != 1 or kwargs:
                    raise TemplateError("`format_map` takes one object")
                args, values = (), args[0]
            return TextFormatter(context).vformat(pattern, args, values)

        return checked_format

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return cast("nodes.Template", LimitInserter().visit(tree))

    def _check_method(self, context: Context, name: str, owner: Any, args: tuple[Any, ...]) -> None:
        """Check a method of a Python value: the size of its result, and of the data that it
        reads."""
        if isinstance(owner, list | tuple):
            measured(context, owner)  # `count` and `index` compare
        else:
            spend_copy(context, owner)
        if name in _WIDTH_METHODS:
            check_widths(name, args)
        if not isinstance(owner, str):
            return
        spend_text(context, name, owner)
        build(context, split_bytes(name, owner, args))
        if name == "expandtabs":
            self._check_length(len(owner) + owner.count("\t") * max((8, *args)))
        elif name == "translate" and args:
            self._check_length(len(owner) * longest_item(args[0]))
        elif name == "replace" and len(args) >= 2:
            self._check_replacement(owner, args[0], args[1])
        elif name == "join" and args:
            self._check_joined(cast("list[Any]", args[0]), owner)
        elif name in _QUADRATIC_METHODS and args and isinstance(args[0], str):
            spend(context, len(owner) * len(args[0]) // _COMPARED_PER_STEP)

    def _check_length(self, num_items: int) -> None:
        if num_items > self._limits.max_characters:
            raise self._too_long()

    def _check_replacement(self, text: str, old: Any, new: Any) -> None:
        growth = len(str(new)) - len(str(old))
        if growth > 0:
            self._check_length(len(text) + text.count(str(old)) * growth)

    def _check_joined(self, items: list[Any], separator: Any) -> None:
        num_characters = sum(len(item) if isinstance(item, str) else 1 for item in items)
        self._check_length(num_characters + len(str(separator)) * len(items))

    def _sized(self, value: Any) -> Any:
        sized: Any = value
        if isinstance(value, str | list | tuple):
            self._check_length(len(sized))
        elif isinstance(value, int):
            check_bits(value.bit_length())
        elif isinstance(value, bytes):
            raise SecurityError("a template can't use bytes")
        return sized

    @pass_context
    def _built(self, context: Context, value: Any) -> Any:
        build(context, built_bytes(value))
        return self._sized(value)

    def _sized_result(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def sized_result(*args: Any, **kwargs: Any) -> Any:
            return self._sized(function(*args, **kwargs))

        return sized_result

    @pass_context
    def _printed(self, context: Context, value: Any) -> str:
        """The text of a value, its size taken from the budget."""
        return value if isinstance(value, str) else text_of(context, measured(context, value))

    @pass_context
    def _concatenated(self, context: Context, operands: list[Any]) -> str:
        """Return the result of `~`."""
        texts: list[str] = []
        num_characters = 0
        for operand in operands:
            texts.append(self._printed(context, operand))
            num_characters += len(texts[-1])
            self._check_length(num_characters)
        spend(context, num_characters // COPIED_CHARACTERS_PER_STEP)
        text = "".join(texts)
        build(context, built_bytes(text))
        return text

    @pass_context
    def _sum(
        self, context: Context, iterable: Iterable[Any], attribute: Any = None, start: Any = 0
    ) -> Any:
        """Sum as Jinja does, each addition under the limits."""
        attribute_of = None if attribute is None else make_attrgetter(self, attribute)
        total = start
        for item in iterable:
            spend(context, 1)
            added = item if attribute_of is None else attribute_of(item)
            total = self.call_binop(context, "+", total, added)
        return total

    @pass_context
    def _trim(self, context: Context, value: Any, chars: str | None = None) -> str:
        text = str(value)
        spend(context, len(text) * len(chars or "") // _COMPARED_PER_STEP)
        return text.strip(chars)

    @pass_context
    def _format(self, context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
        if args and kwargs:
            raise TemplateError("`format` takes values by place or by name, not both")
        pattern = str(value)
        self._check_format(context, pattern, (*args, *kwargs.values()))
        return pattern % format_values(context, pattern, kwargs or args)

    def _check_format(self, context: Context, pattern: str, values: tuple[Any, ...]) -> None:
        def pay(num_steps: int) -> None:
            spend(context, num_steps)

        try:
            self._check_length(num_formatted(pattern, values, pay, LARGEST_WIDTH))
        except OverflowError as error:
            raise TemplateLimitError(str(error)) from None

    def _bounded_indent(self, indent: Callable[..., str]) -> Callable[..., str]:
        def bounded_indent(s: str, width: int | str = 4, *args: Any, **kwargs: Any) -> str:
            num_added = len(width) if isinstance(width, str) else width
            self._check_length(len(s) + (len(s.splitlines()) + 1) * num_added)
            return indent(s, width, *args, **kwargs)

        return bounded_indent

    def _replace(self, s: Any, old: str, new: str, count: int | None = None) -> str:
        text = str(s)
        self._check_replacement(text, old, new)
        return text.replace(str(old), str(new), -1 if count is None else count)

    def _bounded_join(self, join: Callable[..., Any]) -> Callable[..., Any]:
        @pass_context
        def bounded_join(
            context: Context, value: Iterable[Any], d: str = "", attribute: Any = None
        ) -> Any:
            items = list(counted(context, value))
            if attribute is not None:
                items = list(map(make_attrgetter(self, attribute), items))
            items = [self._printed(context, item) for item in items]
            self._check_joined(items, d)
            return self._sized(join(context.eval_ctx, items, d))

        return bounded_join

    @pass_context
    def _list(self, context: Context, value: Iterable[Any]) -> list[Any]:
        if isinstance(value, str):
            build(context, len(value) * BYTES_PER_PIECE)
        return list(value)

    def _too_long(self) -> TemplateLimitError:
        return TemplateLimitError(
            f"it built more than {self._limits.max_characters} characters of text"
        )


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute may not begin with an underscore: {name!r}")
