"""Ctrl-C, held back while a change is made that must be whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["held", "is_ctrl_c", "let_through"]


class _Holder:
    """A handler of SIGINT that remembers, or raises while `lets_through`."""

    def __init__(self) -> None:
        self.has_come = False
        self.lets_through = False

    def __call__(self, *_: object) -> None:
        self.has_come = True
        if self.lets_through:
            self.raise_if_come()

    def raise_if_come(self) -> None:
        if self.has_come:
            self.has_come = self.lets_through = False  # what follows is held back again
            raise KeyboardInterrupt


@contextmanager
def held() -> Generator[None]:
    """Raise KeyboardInterrupt only after the block, or in a part of it that is `let_through`. Only
    the main thread gets it, and a handler that is not Python's own stays in charge: elsewhere, and
    within another such block, nothing is done."""
    if not _is_main() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    holder = _Holder()
    signal.signal(signal.SIGINT, holder)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is holder:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        holder.raise_if_come()


@contextmanager
def let_through() -> Generator[None]:
    """A wait that Ctrl-C may end, within a block that is `held`."""
    holder = signal.getsignal(signal.SIGINT)
    if not isinstance(holder, _Holder) or not _is_main():
        yield
        return
    holder.lets_through = True
    try:
        holder.raise_if_come()
        yield
    finally:
        holder.lets_through = False


def is_ctrl_c(error: BaseException) -> bool:
    """Return whether Ctrl-C may have raised this. It does so in the main thread alone, and not
    where it is held back or ignored: there the code of others has raised it."""
    if not isinstance(error, KeyboardInterrupt) or not _is_main():
        return False
    handler = signal.getsignal(signal.SIGINT)
    return handler is not signal.SIG_IGN and not isinstance(handler, _Holder)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
