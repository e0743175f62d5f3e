"""Every provider of every operation equals the reference on this machine.

Those in Triton are compared in tests/ops/test_triton.py.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

import pytest
import torch
from tests.profiles import SCALE

from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, Case, Op, Provider, Tolerance, check_provider
from quire.ops.check import Outcomes, compare, reference_outcomes
from quire.ops.compile import SOURCE_FOLDER
from quire.ops.native import binding as native
from quire.ops.native.replay import NotCapturableError, ReplayList

PLATFORM = detect_platform()
PROVIDERS = [
    pytest.param(op, provider, id=f"{op.name}-{provider.name}")
    for op in ALL_OPS.values()
    for provider in op.providers
    if provider.name != "triton"
]


SLOW = ("paged_attention",)
"""Operations whose cases take a minute."""


@lru_cache(maxsize=1)
def expected_of(name: str, seed: int) -> Outcomes:
    """Outcomes of the reference, for the providers of one operation in turn."""
    return reference_outcomes(ALL_OPS[name], seed=seed)


SIZES = {"rows", "num_rows", "outer", "count", "num_ids", "tokens", "num_tokens", "num_draws"}
"""Parameters that follow the number of rows or tokens of a step, where they are no pointers."""


@cache
def places_of_sizes() -> dict[str, list[int]]:
    """Indices of the parameters in `SIZES`, by kernel."""
    text = "".join(path.read_text() for path in SOURCE_FOLDER.rglob("*.cpp"))
    names = {
        kernel: [parameter.split()[-1] for parameter in listed.split(",")]
        for kernel, listed in native._EXPORT.findall(text)
    }
    return {
        kernel: [
            place
            for place, kind in enumerate(kinds)
            if names[kernel][place] in SIZES and kind is not ctypes.c_void_p
        ]
        for kernel, kinds in native.read_signatures(text).items()
    }


@pytest.fixture
def repeated_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat each call as a captured step does that is replayed for no rows. Nothing may change."""
    once = native.NativeLibrary.call

    def call(library: native.NativeLibrary, name: str, *arguments: object) -> None:
        once(library, name, *arguments)
        try:
            replayed = ReplayList(
                native.replay_function(library.isa), [library.record(name, arguments)]
            )
        except NotCapturableError:
            return
        places = places_of_sizes()[name]
        assert places, name
        replayed.words[places] = 0
        replayed.run()

    monkeypatch.setattr(native.NativeLibrary, "call", call)


@pytest.mark.parametrize(("op", "provider"), PROVIDERS)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.usefixtures("repeated_for_nothing")
def test_a_provider_equals_the_reference(op: Op, provider: Provider, seed: int) -> None:
    """Turns red when a kernel reads beyond a row, rounds twice, or drops a tail; or when it ends
    the process for no rows, or writes something then."""
    reason = provider.unavailable(PLATFORM)
    if reason is not None:
        pytest.skip(f"{provider.name}: {reason}")
    if seed > 0 and op.name in SLOW and SCALE == 1:
        pytest.skip("its properties have tests of their own: a second seed is for a soak")
    report = check_provider(op, provider, seed=seed, expected=expected_of(op.name, seed))
    assert report.num_cases > 0
    assert not report.failures, "\n".join(report.failures)


@pytest.mark.parametrize("op", ALL_OPS.values(), ids=lambda op: op.name)
def test_every_dtype_of_the_inputs_has_a_tolerance(op: Op) -> None:
    """Turns red when a new input dtype has no stated tolerance with its reason."""
    for case in op.make_inputs(torch.Generator().manual_seed(0)):
        for value in case.args:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                assert op.tolerance[value.dtype].reason


def test_a_wrong_provider_is_reported() -> None:
    """Turns red when the comparison itself stops seeing differences: in what is returned, in what
    is changed in place, in NaN."""
    x = torch.ones(4)
    op = Op(
        name="double",
        reference=lambda x: x * 2,
        make_inputs=lambda generator: iter([Case("ones", (x,))]),
        tolerance={torch.float32: Tolerance(1e-6, 1e-6, "exact")},
    )

    def in_place(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)

    [case] = op.make_inputs(torch.Generator())
    assert compare(op, lambda x: x * 2, case) is None
    assert "largest difference 1" in (compare(op, lambda x: x * 3, case) or "")
    assert "result 1" in (compare(op, in_place, case) or "")
    assert "1 NaN" in (compare(op, lambda x: torch.tensor([2, 2, 2, float("nan")]), case) or "")
    report = check_provider(op, Provider("wrong", lambda platform: None, lambda: lambda x: x))
    assert not report.ok
    assert "double by wrong, ones" in report.failures[0]
