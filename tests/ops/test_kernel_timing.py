"""Timing products by several kernels, whatever the machine: clocks and kernels are stand-ins."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.config.specs import make_platform
from tests.processors import PROCESSORS, on_each_processor

from quire.base.platform import detect_platform
from quire.ops import kernel_timing
from quire.ops.compile import ISAS
from quire.ops.kernel_timing import (
    BUDGET_S,
    FEW_ROWS,
    LEAST_ROUNDS,
    MANY_ROWS,
    kernel_families,
    time_kernels,
)
from quire.ops.native import binding as native
from quire.ops.native.binding import native_unavailable
from quire.ops.native.team import ALONE

PLATFORM = detect_platform()
ALL = tuple(isa.name for isa in ISAS)


class Clock:
    """Time that passes only in kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(kernel_timing, "time", SimpleNamespace(perf_counter=lambda: self.now))


def pretend(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: dict[str, list[float]]
) -> list[str]:
    """Kernels that take these seconds, of few and of many rows, ten times as long at first. The
    calls that they get."""
    calls: list[str] = []

    def load(isa: str, team: object) -> SimpleNamespace:
        del team

        def call(name: str, *arguments: Any) -> None:
            del name
            clock.now += seconds[isa][len(calls) % 2] * (10 if calls.count(isa) < 2 else 1)
            calls.append(isa)

        return SimpleNamespace(call=call)

    monkeypatch.setattr(kernel_timing, "load_native", load)
    return calls


@pytest.mark.parametrize("product", ["linear", "attention", "int8_attention"])
def test_the_least_seconds_of_rounds_but_the_first(
    monkeypatch: pytest.MonkeyPatch, product: kernel_timing.Product
) -> None:
    """Turns red when page faults count as the slowness of the kernels that come first, or kernels
    do not take turns."""
    clock = Clock(monkeypatch)
    seconds = {"a": [0.00001, 0.0001], "b": [0.00002, 0.00003]}
    calls = pretend(monkeypatch, clock, seconds)
    found = time_kernels(product, tuple(seconds), 2, PLATFORM)
    assert found == {isa: pytest.approx(tuple(times)) for isa, times in seconds.items()}
    assert calls[:8] == ["a", "a", "b", "b"] * 2
    assert clock.now <= BUDGET_S + sum(seconds["a"])


@pytest.mark.parametrize("many", [0.01, 0.1])
def test_a_machine_without_time_gives_nothing(monkeypatch: pytest.MonkeyPatch, many: float) -> None:
    """Turns red when a start waits for slow kernels longer than the budget and one call, or few
    calls decide."""
    clock = Clock(monkeypatch)
    calls = pretend(monkeypatch, clock, {"a": [0.0001, many], "b": [0.0001, many]})
    assert time_kernels("linear", ("a", "b"), 1, PLATFORM) is None
    assert len(calls) < 4 * (LEAST_ROUNDS + 1)
    assert clock.now <= BUDGET_S + 10 * (many + 0.0001)


def test_kernels_that_are_alike_are_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when the same code is measured twice, or attention loses a kind of its own."""
    missing: set[str] = set()
    monkeypatch.setattr(
        kernel_timing, "native_unavailable", lambda isa, _: "gone" if isa in missing else None
    )
    wide = ("amx", "avx512_bf16", "avx512_vnni")
    assert kernel_families("linear", PLATFORM) == (*wide, "avx2")
    assert kernel_families("attention", PLATFORM) == (*wide, "avx512", "avx2")
    missing |= {"amx", "avx512_vnni"}
    assert kernel_families("linear", PLATFORM) == ("avx512_bf16", "avx512", "avx2")
    missing |= set(ALL)
    assert kernel_families("linear", PLATFORM) == ()


# Each product has kernels of its own in some of the sets.
FAMILIES_OF = {
    "avx2": {"linear": ("avx2",), "attention": ("avx2",)},
    "avx512": {"linear": ("avx512", "avx2"), "attention": ("avx512", "avx2")},
    "avx512_vnni": {
        "linear": ("avx512_vnni", "avx2"),
        "attention": ("avx512_vnni", "avx512", "avx2"),
    },
    "avx512_bf16": {
        "linear": ("avx512_bf16", "avx512_vnni", "avx2"),
        "attention": ("avx512_bf16", "avx512_vnni", "avx512", "avx2"),
    },
    "amx": {
        "linear": ("amx", "avx512_bf16", "avx512_vnni", "avx2"),
        "attention": ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2"),
    },
}


@on_each_processor
def test_each_processor_has_the_families_of_its_flags(
    processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a processor that nobody runs tests on chooses among other kernels."""
    monkeypatch.setattr(native, "_open", lambda _: object())  # as if all sets were compiled
    platform = make_platform(features=sorted(PROCESSORS[processor]))
    expected = FAMILIES_OF[processor]
    assert kernel_families("linear", platform) == expected["linear"]
    assert kernel_families("attention", platform) == expected["attention"]
    assert kernel_families("int8_attention", platform) == expected["attention"]


@pytest.mark.parametrize("isa", ALL)
def test_what_is_timed_computes_what_it_should(isa: str) -> None:
    """Turns red when a kernel's arguments change and what is timed reads or writes elsewhere."""
    reason = native_unavailable(isa, PLATFORM)
    if reason is not None:
        pytest.skip(reason)
    library = native.load_native(isa, ALONE)
    seen: list[np.ndarray] = []

    def call(name: str, *arguments: Any) -> None:
        """The outputs of all rows, before and after."""
        place, width = (4, arguments[7]) if name == "linear" else (5, arguments[9])
        outputs = (ctypes.c_uint16 * (MANY_ROWS * width)).from_address(arguments[place])
        ctypes.memset(outputs, 0, ctypes.sizeof(outputs))
        library.call(name, *arguments)
        seen.append(np.array(outputs).reshape(MANY_ROWS, width))

    libraries: Any = {isa: SimpleNamespace(call=call)}
    linear = kernel_timing._linear_calls(libraries, 1, PLATFORM)
    attention = [
        kernel_timing._attention_calls(libraries, is_int8=is_int8) for is_int8 in (False, True)
    ]
    # 1024 products of 1 and 2**-7; means of values that are all 2**-7, or 1.
    for calls, value in zip((linear, *attention), (0x4100, 0x3C00, 0x3F80), strict=True):
        for made, rows in zip(calls[isa], (FEW_ROWS, MANY_ROWS), strict=True):
            made()
            assert (seen[-1][:rows] == value).all()
            assert not seen[-1][rows:].any()
