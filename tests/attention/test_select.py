"""Choosing an attention backend, and what each takes on trust."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.base.errors import ConfigError, EngineError
from quire.base.platform import detect_platform
from quire.base.platform.gpu_facts import GpuFacts
from quire.compute.attention import (
    AttentionBackend,
    AttentionNeeds,
    GroupInputs,
    KVPool,
    ScoreOptions,
    StepInputs,
    backend_of_isa,
    flash_attn3,
    flashinfer,
    select_backend,
    select_backends,
)
from quire.compute.attention.select import BACKENDS
from quire.config import env
from quire.config.kv_layout import KVFormat, KVLayout
from quire.ops import ALONE
from quire.ops.attention.paged_attention import OP
from quire.ops.attention.paged_batch import paged_batch
from quire.ops.kv.pages import EMPTY_BYTE

PLATFORM = detect_platform()
BARE = replace(PLATFORM, cpu=replace(PLATFORM.cpu, features=frozenset[str]()))
H200 = GpuFacts("nvidia", "H200", "SM 90", (9, 0), 2**37, 2**37, "580", (13, 0))
NEEDS = AttentionNeeds(torch.float32, torch.bfloat16, 64, 4, 2)


def test_a_bare_processor_gets_the_reference_and_the_reason() -> None:
    """Turns red when the start-up report does not say why the slow path was taken."""
    choice = select_backend(BARE, NEEDS)
    assert choice.backend.name == "reference"
    assert "lacks avx512f" in choice.reason


def test_a_dtype_that_kernels_lack_is_served_by_the_reference() -> None:
    """Turns red when an 8-bit cache is read as something else."""
    needs = replace(NEEDS, cache_dtype=torch.float8_e4m3fn)
    assert select_backend(PLATFORM, needs).backend.name == "reference"


WORDS = {"soft_cap": "soft-capped scores", "alibi_slopes": "ALiBi", "sinks": "attention sinks"}


def test_reasons_say_what_a_user_knows() -> None:
    """Turns red when a start-up report names dtypes as torch does, arguments of our operations, or
    on a CPU what only a GPU could serve."""
    changes: list[dict[str, Any]] = [
        *({"scores": frozenset({option})} for option in WORDS),
        {"dtype": torch.float64},
        {"cache_dtype": torch.float8_e4m3fn},
        {"head_dim": 320},
        {"value_dim": 32},
        {"last_key": True},
    ]
    cpu, gpu = replace(PLATFORM, device="cpu"), replace(PLATFORM, device="cuda", gpu=H200)
    for platform, needs in itertools.product(
        (cpu, gpu), (replace(NEEDS, **each) for each in changes)
    ):
        told = select_backend(platform, needs).reason
        assert not re.search(r"torch\.|soft_cap|alibi_", told)
        assert platform is gpu or "GPU" not in told


@pytest.mark.parametrize("option", WORDS)
def test_scores_that_kernels_cannot_change_are_left_to_those_that_can(option: str) -> None:
    """Turns red when a model's soft-cap, slopes or sinks are dropped without a word."""
    needs = replace(NEEDS, scores=frozenset({option}))
    choice = select_backend(PLATFORM, needs)
    name = choice.backend.name
    assert all(option not in provider.lacks for provider in OP.providers if provider.name == name)
    for provider in OP.providers:
        refusal = BACKENDS[provider.name].refusal(PLATFORM, needs)
        if option in provider.lacks:
            assert f"no {WORDS[option]}" in (refusal or "")
            assert choice.reason.count(refusal or "") == 1
            names = choice.reason.partition(f" cannot serve: {refusal}")[0].rpartition("; ")[2]
            assert provider.name in names.split(", ")
    value = 1.5 if option == "soft_cap" else torch.tensor([0.1, 0.2, 0.3, 0.4])
    step, group, q = one_step(choice.backend, window=7)
    arguments = (q, step.kv.layers[1], 0.2, step, group)
    changed = choice.backend.run(*arguments, ScoreOptions(**{option: value}))
    assert not torch.equal(changed, choice.backend.run(*arguments))


def test_each_group_is_served_by_what_it_needs() -> None:
    """Turns red when one group's needs send all layers to the reference, when groups that need the
    same do not share, or when the report does not say whom a slow path serves."""
    foreign = replace(NEEDS, cache_dtype=torch.float8_e5m2)
    layers = ((0, 3), (1, 4), (2, 5))
    chosen = select_backends(PLATFORM, (NEEDS, foreign, NEEDS), layers)
    first, second, third = chosen.backends
    assert first is third
    assert first.name == select_backend(PLATFORM, NEEDS).backend.name
    assert second.name == "reference"
    assert "for layers 0, 2, 3, 5; " in chosen.reason
    assert "float8_e5m2 for a model in float32) for layers 1, 4" in chosen.reason
    alike = select_backends(PLATFORM, (NEEDS, NEEDS), layers[:2])
    assert alike.reason == select_backend(PLATFORM, NEEDS).reason
    with pytest.raises(ConfigError, match="cannot serve here: it reads no KV cache in float8_e5m2"):
        select_backends(PLATFORM, (NEEDS, foreign), layers[:2], "cpu_avx2")


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
def test_a_plane_of_two_widths_is_served_by_the_same_kernels(cache_dtype: torch.dtype) -> None:
    """Turns red when latent attention runs on the reference beside kernels that can serve it."""
    plain = replace(NEEDS, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    latent = replace(plain, head_dim=72, value_dim=64, num_kv_heads=1)
    chosen = select_backends(PLATFORM, (plain, latent), ((0,), (1,)))
    assert [each.name for each in chosen.backends] == [chosen.backends[0].name] * 2


@pytest.mark.parametrize("name", BACKENDS)
def test_what_a_group_cannot_have_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when a backend takes other widths, or queries that see later keys, on trust."""
    for module in (flash_attn3, flashinfer):
        monkeypatch.setattr(module, "find_spec", lambda _: object())
    gpu = replace(PLATFORM, device="cuda", gpu=H200)
    needs = AttentionNeeds(torch.bfloat16, torch.bfloat16, 64, 4, 2)
    refusals = {
        field: BACKENDS[name].refusal(gpu, replace(needs, **change)) or ""
        for field, change in (("value_dim", {"value_dim": 32}), ("last_key", {"last_key": True}))
    }
    serves_all = name == "reference" or name.startswith("cpu_")
    assert ("64 and 32" in refusals["value_dim"]) != serves_all
    assert ("bidirectional" in refusals["last_key"]) != serves_all


def test_forcing_is_obeyed_or_refused() -> None:
    """Turns red when a forced backend is silently replaced."""
    assert select_backend(PLATFORM, NEEDS, "reference").backend.name == "reference"
    with pytest.raises(ConfigError, match=r"'flash'.*Use one of"):
        select_backend(PLATFORM, NEEDS, "flash")
    with pytest.raises(ConfigError, match=r"'cpu_avx2' cannot serve here: .*lacks avx2"):
        select_backend(BARE, NEEDS, "cpu_avx2")


def test_a_preference_gives_way_to_what_can_serve() -> None:
    """Turns red when kernels that were measured to be fast are not taken, or when a model that they
    cannot serve does not start."""
    foreign = replace(NEEDS, cache_dtype=torch.float8_e5m2)
    if BACKENDS["cpu_avx2"].refusal(PLATFORM, NEEDS) is None:
        taken = select_backend(PLATFORM, NEEDS, preferred="cpu_avx2")
        assert taken.backend.name == "cpu_avx2"
        assert select_backend(PLATFORM, foreign, preferred="cpu_avx2").backend.name == "reference"
        forced = select_backend(PLATFORM, NEEDS, "reference", preferred="cpu_avx2")
        assert forced.backend.name == "reference"
    assert select_backend(BARE, NEEDS, preferred="cpu_avx2").backend.name == "reference"


def test_isa_names_are_backend_names() -> None:
    """Turns red when QUIRE_CPU_ISA moves the operations but not attention."""
    assert backend_of_isa(None) is None
    assert {backend_of_isa(isa) for isa in env.CPU_ISAS} == set(BACKENDS) - {
        "fa3",
        "triton",
        "flashinfer",
    }


@pytest.mark.parametrize("name", BACKENDS)
def test_plan_and_run_serve_a_layer_of_a_pool(name: str) -> None:
    """Turns red when a backend mixes up planes, windows or the fields of the step."""
    refusal = BACKENDS[name].refusal(PLATFORM, NEEDS)
    if refusal is not None:
        pytest.skip(f"{name}: {refusal}")
    backend = BACKENDS[name].make(ALONE)
    step, group, q = one_step(backend, window=7)
    cache = step.kv.layers[1]
    got = backend.run(q, cache, 0.2, step, group)
    reference = BACKENDS["reference"].make(ALONE).run(q, cache, 0.2, step, group)
    torch.testing.assert_close(got, reference)
    assert got.isfinite().all()


@pytest.mark.parametrize("name", [provider.name for provider in OP.providers])
def test_metadata_that_a_kernel_cannot_read_are_refused(name: str) -> None:
    """Turns red when int64 block tables are read as int32, which is somebody else's memory."""
    refusal = BACKENDS[name].refusal(PLATFORM, NEEDS)
    if refusal is not None:
        pytest.skip(f"{name}: {refusal}")
    backend = BACKENDS[name].make(ALONE)
    good = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(EngineError, match=r"seq_lens is torch\.int64.*Give int32"):
        backend.plan(good, good.long(), good[None], None)


def one_step(
    backend: AttentionBackend, window: int | None
) -> tuple[StepInputs, GroupInputs, torch.Tensor]:
    batch = paged_batch(
        torch.Generator().manual_seed(0),
        [(1, 30), (4, 12)],
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        block_size=8,
        dtype=torch.float32,
    )
    num_blocks, *page = batch.k_cache.shape
    block_size, *heads = page
    layout = KVLayout.of_windows([None, None], block_size, KVFormat.plain(*heads, "float32"))
    pool = KVPool.allocate(layout, num_blocks, batch.k_cache.dtype, torch.device("cpu"))
    pool.pages.fill_(EMPTY_BYTE)
    pool.layers[1].k.copy_(batch.k_cache)
    pool.layers[1].v.copy_(batch.v_cache)
    plan = backend.plan(batch.query_start_loc, batch.seq_lens, batch.block_table, window)
    group = GroupInputs(
        block_table=batch.block_table,
        slot_mapping=torch.empty(0, dtype=torch.int64),
        window=window,
        plan=plan,
    )
    step = StepInputs(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        max_query_len=4,
        max_seq_len=30,
        groups=(group,),
        kv=pool,
    )
    return step, group, batch.q
