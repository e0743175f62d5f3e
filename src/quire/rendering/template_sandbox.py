"""The Jinja environment in which chat templates run. Imports jinja2; loaded when first needed.

Templates come with downloaded models and are code. They run without access to Python internals,
and under limits: steps (loop iterations and calls), wall time, and the size of every string they
build. The limits stop accidents and simple attacks inside this process; whoever runs templates of
unknown origin should do so in a process that can be killed.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

# Not identifiers of the template language, so no template can name them.
_BUDGET = "budget of the render"
_COUNTED = "counted iterable"
_SIZED = "sized text"
_CHARGED = "charged operand"
# A filter or comparison goes through its operand in C, which is this much faster than a step.
_ITEMS_PER_STEP = 32
_STEPS_PER_CLOCK_READ = 256
# Widths, repeat counts and precisions beyond this serve no prompt.
_LARGEST_WIDTH = 100_000
_LONG_WIDTH = re.compile(r"%[-+ #0]*\.?\d*\.?\d{6}|\{[^{}]*:[^{}]*\d{6}")
_BORROWED_WIDTH = re.compile(r"%[-+ #0\d.]*\*|\{[^{}]*:[^{}]*\{")
_WHOLE = (str, list, tuple, dict)
_WIDTH_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_WIDTH_FILTERS = ("center", "indent", "batch", "slice", "wordwrap", "truncate", "round")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one render may use. `max_characters` bounds the prompt and each string on the way."""

    max_characters: int = 1 << 24
    max_steps: int = 4_000_000
    max_seconds: float = 5.0


class TemplateLimitError(TemplateError):
    """A template used more than `TemplateLimits` allows."""


class RenderBudget:
    """Counts the steps of one render against its limits."""

    def __init__(self, limits: TemplateLimits, clock: Callable[[], float]) -> None:
        self._steps_left = limits.max_steps
        self._clock = clock
        self._deadline = clock() + limits.max_seconds
        self._limits = limits
        self._next_check = self._steps_left - _STEPS_PER_CLOCK_READ

    def spend(self, num_steps: int) -> None:
        """Take `num_steps`; TemplateLimitError when none are left or the time is over."""
        self._steps_left -= num_steps
        if self._steps_left > self._next_check:
            return
        self._next_check = self._steps_left - _STEPS_PER_CLOCK_READ
        if self._steps_left < 0:
            raise TemplateLimitError(f"it took more than {self._limits.max_steps} steps")
        if self._clock() > self._deadline:
            raise TemplateLimitError(f"it ran for more than {self._limits.max_seconds} s")


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

    intercepted_binops = frozenset({"+", "*", "**", "%"})

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
        variables["raise_exception"] = _raise_exception
        variables["strftime_now"] = _clock_reader(now)
        variables["dict"] = _make_dict
        variables["namespace"] = ChatNamespace
        filters = cast(
            "dict[str, Callable[..., Any]]",
            self.filters,  # pyright: ignore[reportUnknownMemberType]
        )
        filters["tojson"] = _to_json
        filters[_COUNTED] = _counted
        filters[_SIZED] = self._sized
        filters[_CHARGED] = _charged
        filters["format"] = _checked_format_filter(filters["format"])
        filters["replace"] = self._replace
        filters["join"] = self._bounded_join(filters["join"])
        for name in _WIDTH_FILTERS:
            filters[name] = _bounded_arguments(name, filters[name])

    def render(
        self,
        template: jinja2.Template,
        variables: Mapping[str, Any],
        limits: TemplateLimits | None = None,
    ) -> str:
        """Render under the limits; TemplateLimitError when one is exceeded.

        `limits` bounds steps and time of this render more tightly than the environment's own.
        """
        budget = RenderBudget(limits or self._limits, self._clock)
        parts: list[str] = []
        num_left = self._limits.max_characters
        for part in template.generate({**variables, _BUDGET: budget}):
            num_left -= len(part)
            if num_left < 0:
                raise self._too_long()
            parts.append(part)
        return "".join(parts)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Count the call, and check what it builds."""
        budget: RenderBudget | None = context.parent.get(_BUDGET)
        if budget is not None:
            budget.spend(1)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | int):
            self._check_method(obj.__name__, owner, args)
        return self._sized(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse the operators that make small operands huge."""
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(text, Sized):
                    self._check_length(len(text) * max(count, 0))
        elif operator == "**" and isinstance(right, int | float) and abs(right) > 64:
            raise TemplateLimitError(f"the exponent {right} is too large")
        elif operator == "%" and isinstance(left, str):
            values = cast("tuple[Any, ...]", right) if isinstance(right, tuple) else (right,)
            _check_format(left, values)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            self._check_length(len(left) + len(right))
        return self._sized(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's `str.format`, with its widths checked."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        pattern = str(value.__self__)

        def checked_format(*args: Any, **kwargs: Any) -> str:
            _check_format(pattern, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked_format

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return cast("nodes.Template", _LimitInserter().visit(tree))

    def _check_method(self, name: str, owner: str | int, args: tuple[Any, ...]) -> None:
        if name in _WIDTH_METHODS:
            _check_widths(name, args)
        elif name == "replace" and isinstance(owner, str) and len(args) >= 2:
            self._check_replacement(owner, args[0], args[1])
        elif name == "join" and args and isinstance(args[0], list | tuple):
            self._check_joined(cast("list[Any]", args[0]), owner)

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
        return sized

    def _replace(self, s: Any, old: str, new: str, count: int | None = None) -> str:
        text = str(s)
        self._check_replacement(text, old, new)
        return text.replace(str(old), str(new), -1 if count is None else count)

    def _bounded_join(self, join: Callable[..., Any]) -> Callable[..., Any]:
        @pass_context
        def bounded_join(
            context: Context, value: Iterable[Any], d: str = "", attribute: Any = None
        ) -> Any:
            items = list(_counted(context, value))
            if attribute is None:
                self._check_joined(items, d)
            return self._sized(join(context.eval_ctx, items, d, attribute))

        return bounded_join

    def _too_long(self) -> TemplateLimitError:
        return TemplateLimitError(
            f"it built more than {self._limits.max_characters} characters of text"
        )


class _LimitInserter(NodeTransformer):
    """Puts the counters into the syntax tree: what is looped over, what is built with `~`, and
    what is gone through as a whole (by filters, comparisons and slices)."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node, node.iter, _COUNTED)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        if node.node is not None:
            node.node = _filtered(node, node.node, _CHARGED)
        return node

    def visit_Operand(self, node: nodes.Operand) -> nodes.Operand:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(node, node.expr, _CHARGED)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Test:  # noqa: N802
        self.generic_visit(node)
        node.args = [_filtered(node, argument, _CHARGED) for argument in node.args]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node, node.node, _CHARGED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, node, _SIZED)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:  # noqa: N802
        self.generic_visit(node)
        node.filter = _filtered(node, node.filter, _SIZED)
        return node


def _filtered(place: nodes.Node, value: nodes.Node | None, name: str) -> nodes.Filter:
    """`value | name` at the line of `place`."""
    wrapped = nodes.Filter(value, name, [], [], None, None, lineno=place.lineno)
    wrapped.environment = place.environment
    return wrapped


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    """`items`, its length taken from the budget: at once if known, else one by one."""
    budget: RenderBudget | None = context.parent.get(_BUDGET)
    if budget is None:
        return items
    if isinstance(items, Sized):
        budget.spend(len(items))
        return items

    def one_by_one() -> Iterator[Any]:
        for item in items:
            budget.spend(1)
            yield item

    return one_by_one()


@pass_context
def _charged(context: Context, operand: Any) -> Any:
    """`operand`, its length taken from the budget before something goes through it."""
    budget: RenderBudget | None = context.parent.get(_BUDGET)
    if budget is not None:
        budget.spend(1 + _num_items(operand) // _ITEMS_PER_STEP)
    return operand


def _num_items(value: object) -> int:
    return len(cast("Sized", value)) if isinstance(value, _WHOLE) else 0


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _clock_reader(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        return now().strftime(format)

    return strftime_now


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    if indent is not None:
        _check_widths("tojson", (indent,))
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _bounded_arguments(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_widths(name, args[1:])
        _check_widths(name, tuple(kwargs.values()))
        return function(*args, **kwargs)

    # Jinja reads from the function which context argument it wants.
    bounded.__dict__.update(function.__dict__)
    return bounded


def _check_widths(name: str, args: tuple[Any, ...]) -> None:
    for value in args:
        if isinstance(value, int) and abs(value) > _LARGEST_WIDTH:
            raise TemplateLimitError(f"`{name}` was asked for a width of {value}")


def _checked_format_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_format(str(value), (*args, *kwargs.values()))
        return function(value, *args, **kwargs)

    return checked


def _check_format(pattern: str, values: tuple[Any, ...]) -> None:
    """Widths stand in the format string, or come from the values (`%*d`, `{:{}}`)."""
    if _LONG_WIDTH.search(pattern):
        raise TemplateLimitError("a format string has a width of more than 5 digits")
    if _BORROWED_WIDTH.search(pattern):
        _check_widths("format", values)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute may not begin with an underscore: {name!r}")
