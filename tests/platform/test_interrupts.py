"""Ctrl-C comes after a block that must be whole, or in a wait that it may end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from quire.base.platform.interrupts import held, let_through


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """A shell may have ignored the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_comes_after_the_outermost_block() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt), held():
        with held():
            press()
            done.append(1)
        done.append(2)
    assert done == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with held():
        done.append(3)
    with pytest.raises(KeyboardInterrupt):
        press()


@pytest.mark.parametrize("is_early", [True, False])
def test_it_ends_a_wait_once(is_early: bool) -> None:
    done: list[int] = []
    with held():
        if is_early:
            press()
        with pytest.raises(KeyboardInterrupt), let_through():
            done.append(1)
            press()
            done.append(2)
        done.append(3)
    assert done == ([3] if is_early else [1, 3])


def test_what_comes_while_an_exception_leaves_is_raised_too() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, held():
        press()
        raise ValueError
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_of_the_program_stays_in_charge() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    with held(), let_through():
        press()
        assert seen == [1]
    press()
    assert seen == [1, 1]


def test_other_threads_neither_hold_nor_let_through() -> None:
    with pytest.raises(KeyboardInterrupt), held():
        before = signal.getsignal(signal.SIGINT)

        def wait() -> None:
            with held(), let_through():
                press_later.wait(60)

        press_later = threading.Event()
        thread = threading.Thread(target=wait)
        thread.start()
        press()
        assert signal.getsignal(signal.SIGINT) is before
        press_later.set()
        thread.join()
