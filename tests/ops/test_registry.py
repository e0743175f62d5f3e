"""Choosing providers: best first, forced ones exactly, refusals that say why."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import fields, replace
from functools import partial

import pytest
import torch

from quire.base.errors import ConfigError
from quire.base.platform import detect_platform
from quire.ops import (
    ALL_OPS,
    REFERENCE,
    OpSet,
    build_op_set,
    force_invariance,
    force_isa,
    force_linear,
    select,
)

PLATFORM = detect_platform()
BARE = replace(PLATFORM, cpu=replace(PLATFORM.cpu, features=frozenset[str]()))


def test_every_operation_has_a_place_in_the_op_set() -> None:
    """Turns red when an operation is added to one of the two and not to the other."""
    about = {"chosen", "activation_bits"}
    assert {field.name for field in fields(OpSet)} - about == set(ALL_OPS)


def test_the_registry_is_read_only() -> None:
    """Turns red when the registry becomes a place where anything may be put at run time."""
    assert not isinstance(ALL_OPS, MutableMapping)


def test_a_bare_processor_gets_the_references() -> None:
    """But for drawing, whose reference sorts whole rows, and inputs, which numpy gathers
    faster. Turns red when a kernel is chosen for a processor without its instructions."""
    ops = build_op_set(BARE)
    others = {op: name for op, name in ops.chosen.items() if name != REFERENCE}
    assert others == {"draw": "numpy", "step_inputs": "numpy"}
    assert ops.rms_norm is ALL_OPS["rms_norm"].reference


def test_another_device_gets_no_cpu_kernel() -> None:
    """Turns red when raw pointers to device memory are given to a CPU kernel."""
    chosen = build_op_set(replace(PLATFORM, device="cuda")).chosen
    assert set(chosen.values()) <= {REFERENCE, "triton", "torch", "measured"}


def test_isa_none_means_plain_torch() -> None:
    """Turns red when QUIRE_CPU_ISA=none still runs C++."""
    assert set(build_op_set(PLATFORM, force_isa("none")).chosen.values()) == {REFERENCE}


@pytest.mark.parametrize("isa", ["avx512", "avx2"])
def test_a_forced_isa_is_used_by_every_operation_that_has_it(isa: str) -> None:
    """Turns red when forcing one instruction set leaves some operations on another."""
    reason = ALL_OPS["rms_norm"].provider(f"cpu_{isa}").unavailable(PLATFORM)
    if reason is not None:
        pytest.skip(f"{isa}: {reason}")
    chosen = build_op_set(PLATFORM, force_isa(isa)).chosen
    assert chosen["paged_attention"] == chosen["rms_norm"] == f"cpu_{isa}"
    assert set(chosen.values()) <= {f"cpu_{isa}", "numpy", REFERENCE}


def test_no_wish_forces_nothing() -> None:
    """Turns red when an unset variable changes the choice."""
    assert force_isa(None) == force_linear(None) == {}


@pytest.mark.parametrize("name", ["linear", "linear_int8", "linear_int4", "linear_blocks"])
def test_products_of_another_isa_move_nothing_else(name: str) -> None:
    """Turns red when kernels that were measured to be fast for 16 bits slow down other operations,
    or layers with a gate need a second call then."""
    reason = ALL_OPS["linear"].provider("cpu_avx2").unavailable(PLATFORM)
    if reason is not None:
        pytest.skip(reason)
    usual, ops = build_op_set(PLATFORM), build_op_set(PLATFORM, force_linear("avx2"))
    assert ops.chosen == {**usual.chosen, "linear": "cpu_avx2", "linear_tables": "cpu_avx2"}
    assert isinstance(fused := ops.gated_linear(name, "silu"), partial)
    assert fused.keywords == {"gate": "silu"}
    plain = build_op_set(PLATFORM, {**force_linear("avx2"), "activation_and_mul": REFERENCE})
    assert not isinstance(plain.gated_linear(name, "silu"), partial)


def test_refusals_name_the_value_and_the_way_out() -> None:
    """Turns red when a forced provider that cannot run is silently replaced."""
    op = ALL_OPS["rms_norm"]
    with pytest.raises(ConfigError, match=r"'gpu'.*Use one of: .*reference"):
        select(op, PLATFORM, "gpu")
    with pytest.raises(ConfigError, match=r"'cpu_avx2'.*lacks avx2.*Give QUIRE_CPU_ISA another"):
        select(op, BARE, "cpu_avx2")
    with pytest.raises(ConfigError, match=r"No such operation: norm\. Use one of"):
        build_op_set(PLATFORM, {"norm": REFERENCE})


def test_batch_invariance_is_a_choice_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when a GPU's fastest product serves although bits must not depend on the batch, or
    when a machine that cannot keep the promise starts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    pytest.importorskip("triton")
    cuda = replace(PLATFORM, device="cuda")
    assert force_invariance(cuda, {"draw": REFERENCE}) == {
        "draw": REFERENCE,
        "linear": "triton_invariant",
    }
    for platform, forced in (
        (BARE, {}),
        (cuda, {"linear": REFERENCE}),
        (PLATFORM, force_isa("none")),
    ):
        with pytest.raises(ConfigError, match=r"batch_invariant=True needs compiled kernels"):
            force_invariance(platform, forced)


def test_batch_invariance_changes_nothing_on_a_cpu_with_kernels() -> None:
    """Turns red when asking for what is there anyway gives another kernel."""
    chosen = build_op_set(PLATFORM).chosen["linear"]
    if chosen == REFERENCE:
        pytest.skip("no compiled kernels")
    assert force_invariance(PLATFORM, {}) == {"linear": chosen}
