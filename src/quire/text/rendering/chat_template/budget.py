"""Budget of one render in time, steps and text, and how the parts of a template pay for it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, cast

from jinja2.exceptions import TemplateError
from jinja2.runtime import Context
from jinja2.utils import pass_context

from quire.text.rendering.chat_template.sizes import BYTES_PER_PIECE, ITEMS_PER_STEP, walk

# Not identifiers of the template language, so no template can name them.
BUDGET = "budget of the render"
REFUSES_NULL = "null is refused"
COPIED_CHARACTERS_PER_STEP = 4096
SECONDS_PER_STEP = 1.5e-6
"""Seconds of one step, the unit of the costs of filters and methods: about a call from a
template."""
_STEPS_PER_CLOCK_READ = 256
_BYTES_PER_CLOCK_READ = 1 << 20
# Python's own operators on ints are quadratic, and print no more than 4300 digits.
_MAX_INT_BITS = 1 << 16
_WHOLE = (str, list, tuple, dict)


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits of one render. `max_characters` bounds the prompt and each string on the way,
    `max_built_bytes` all strings, lists and other values that it builds, dropped ones included."""

    max_characters: int = 1 << 24
    max_built_bytes: int = 256 << 20
    max_steps: int = 4_000_000
    max_seconds: float = 5.0


class TemplateLimitError(TemplateError):
    """A template used more than `TemplateLimits` allows."""


class NullUsedError(TemplateError):
    """A template used null as a text or a list, in a render that refuses it."""


class RenderBudget:
    """Counts the steps of one render against its limits."""

    def __init__(self, limits: TemplateLimits, clock: Callable[[], float]) -> None:
        self._steps_left = limits.max_steps
        self._bytes_left = limits.max_built_bytes
        self._clock = clock
        self._deadline = clock() + limits.max_seconds
        self._limits = limits
        self._next_check = self._steps_left - _STEPS_PER_CLOCK_READ

    def spend(self, num_steps: int) -> None:
        """Take `num_steps`. Raises TemplateLimitError when none are left, or the time is over or
        too short for them: one call of C code can't be stopped."""
        self._steps_left -= num_steps
        if self._steps_left > self._next_check:
            return
        self._next_check = self._steps_left - _STEPS_PER_CLOCK_READ
        if self._steps_left < 0:
            raise TemplateLimitError(f"it took more than {self._limits.max_steps} steps")
        self._check_clock(num_steps * SECONDS_PER_STEP)

    def _check_clock(self, seconds_needed: float = 0.0) -> None:
        if self._clock() + seconds_needed > self._deadline:
            raise TemplateLimitError(f"it would run for more than {self._limits.max_seconds} s")

    def build(self, num_bytes: int) -> None:
        """Take memory; TemplateLimitError when none is left."""
        if num_bytes > _BYTES_PER_CLOCK_READ:
            self._check_clock()  # it took long, too
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            most = self._limits.max_built_bytes
            raise TemplateLimitError(f"it built values of more than {most} bytes in total")


def spend(context: Context, num_steps: int) -> None:
    """Take steps from the budget of the running render."""
    budget: RenderBudget | None = context.parent.get(BUDGET)
    if budget is not None:
        budget.spend(num_steps)


def build(context: Context, num_bytes: int) -> None:
    """Take bytes from the budget of the running render."""
    budget: RenderBudget | None = context.parent.get(BUDGET)
    if budget is not None:
        budget.build(num_bytes)


def spend_copy(context: Context, value: Any) -> None:
    """For a value that is built or gone through at one go."""
    is_text = isinstance(value, str)
    spend(context, _num_items(value) // (COPIED_CHARACTERS_PER_STEP if is_text else ITEMS_PER_STEP))


def take_null(context: Context) -> None:
    """Before null is used as an empty text or list; NullUsedError if this render refuses it."""
    if context.parent.get(REFUSES_NULL):
        raise NullUsedError("it uses null as a text or a list")


@pass_context
def listed(context: Context, items: Any) -> Any:
    """`items`; an empty list for null, which templates go through where they mean "nothing"."""
    if items is not None:
        return items
    take_null(context)
    return ()


class _CountedItems:
    """Items that are paid for one by one, so that the clock is read while they are gone through."""

    def __init__(self, items: Collection[Any], budget: RenderBudget) -> None:
        self._items = items
        self._budget = budget

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.spend(1)
            yield item


@pass_context
def counted(context: Context, items: Iterable[Any] | None) -> Iterable[Any]:
    """`items`, each of them taken from the budget when it is reached."""
    budget: RenderBudget | None = context.parent.get(BUDGET)
    if items is None:
        return listed(context, items)
    if budget is None:
        return items
    if isinstance(items, str):
        budget.build(len(items) * BYTES_PER_PIECE)
    if isinstance(items, Collection):
        return _CountedItems(items, budget)

    def one_by_one() -> Iterator[Any]:
        for item in items:
            budget.spend(1)
            yield item

    return one_by_one()


@pass_context
def charged(context: Context, operand: Any) -> Any:
    """`operand`, its length taken from the budget before something goes through it."""
    spend(context, 1 + _num_items(operand) // ITEMS_PER_STEP)
    return operand


@pass_context
def measured(context: Context, operand: Any) -> Any:
    """`operand`, all that is in it taken from the budget before something goes through it."""

    def pay(num_steps: int) -> None:
        spend(context, num_steps)

    if isinstance(operand, str):
        pay(1 + len(operand) // ITEMS_PER_STEP)
    elif isinstance(operand, int):
        check_bits(operand.bit_length())
    elif isinstance(operand, Iterator):
        return (measured(context, item) for item in cast("Iterator[Any]", operand))
    elif operand is not None:
        walk(operand, pay)
    return operand


def _num_items(value: object) -> int:
    return len(cast("Sized", value)) if isinstance(value, _WHOLE) else 0


def check_bits(num_bits: int) -> None:
    """Check the bits of an int; TemplateLimitError if they are too many."""
    if num_bits > _MAX_INT_BITS:
        raise TemplateLimitError(f"a number of {num_bits} bits is too large")
