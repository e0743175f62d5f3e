"""Kernels in Triton, on a machine without a GPU: they are right in Triton's interpreter, and they
compile for GPUs that are not here. Neither shows that they are right on a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.profiles import SCALE

from quire.base.platform import detect_platform
from quire.config import env
from quire.ops import ALL_OPS, REFERENCE, Op, build_op_set
from quire.ops.attention.paged_batch import paged_batch

pytest.importorskip("triton")
from tests.ops.triton.compiler import AMD, AMPERE, HOPPER, Launch, compiled, launches, spilled_bytes

PLATFORM = detect_platform()
# (GPU, its machine code, KiB of shared memory that a program may have)
TARGETS = ((HOPPER, "cubin", 227), (AMD, "hsaco", 64), (AMPERE, "cubin", 163))
TARGETS = TARGETS if SCALE > 1 else TARGETS[:1]
OPS = [op for op in ALL_OPS.values() if op.provider("triton") is not None]
NEVER_SPILL = ("draw", "edit_logits", "token_logprobs", "embedding")
SLOW = ("paged_attention",)
INTERPRETED = sorted((Path(__file__).parent / "triton").glob("interpreted_[!c]*.py"))


@pytest.mark.parametrize("path", INTERPRETED, ids=lambda path: path.stem)
def test_in_the_interpreter(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, since Triton is asked to interpret before it is imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_kernels_compile_to_machine_code(
    op: Op, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Turns red when a kernel uses what only the interpreter understands, or asks for more shared
    memory than a multiprocessor has, or keeps in memory what should be in registers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for target, code, shared in TARGETS:
        monkeypatch.setattr(torch.version, "hip", "6.4" if target is AMD else None)
        for launch in _some_launches(op):
            kernel = compiled(launch, target)
            assert kernel.asm[code], launch.label
            assert kernel.metadata.shared <= shared * 1024, f"{target}: {launch.label}"
            if op.name in NEVER_SPILL and code == "cubin":
                assert spilled_bytes(kernel, tmp_path) == 0, f"{target}: {launch.label}"


def test_a_decode_step_is_one_launch_whatever_its_lengths() -> None:
    """And a second one to merge, where tables can hold rows of several pieces. Turns red when a
    captured step would not fit the next one's lengths, or a kernel for prompts runs in it."""
    op = ALL_OPS["paged_attention"]
    provider = op.provider("triton")
    assert provider is not None
    call, found = provider.load(), []
    for lengths in ((1, 17, 600), (900, 0, 3)):
        batch = paged_batch(
            torch.Generator().manual_seed(0),
            [(1, length) for length in lengths],
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            block_size=16,
            dtype=torch.bfloat16,
        )
        table = torch.zeros((3, 60), dtype=torch.int32)
        tensors = (batch.q, batch.k_cache, batch.v_cache, table, batch.query_start_loc)
        with launches() as seen:
            call(*tensors, batch.seq_lens, 0.1, max_query_len=1)
        assert [launch.kernel.__name__ for launch in seen] == ["_decode_kernel", "_merge_kernel"]
        found.append(seen)
    assert found[0] == found[1]
    with launches() as seen:
        call(
            batch.q, batch.k_cache, batch.v_cache, table[:, :16], *tensors[4:], batch.seq_lens, 0.1
        )
    assert [launch.kernel.__name__ for launch in seen] == ["_decode_kernel", "_prefill_kernel"]


def _step_inputs(num_rows: int) -> None:
    rows = torch.zeros((64, 100), dtype=torch.int32)
    counts, starts = torch.zeros(num_rows), torch.arange(num_rows + 1)
    step = (rows, rows, 16, counts, counts, counts, counts, rows)
    _call("step_inputs", counts, starts, counts, *step)


def _append_tokens(num_rows: int) -> None:
    rows = torch.zeros(num_rows, dtype=torch.int64)
    tokens = torch.zeros((64, 100), dtype=torch.int32)
    for positions in (None, rows):
        _call("append_tokens", rows, rows.int(), rows, rows, tokens, 63, positions)


def _apply_updates(count: int) -> None:
    words = torch.zeros(1000, dtype=torch.int32)  # as they lie in a runner's inbox
    _call("apply_updates", words, words[64 : 64 + count], words[64 + count : 64 + 2 * count])


def _copy_blocks(count: int) -> None:
    blocks = torch.arange(count)
    _call("copy_blocks", torch.zeros((2, 2, 64, 16, 8), dtype=torch.uint8), blocks, blocks)


def _attend(num_rows: int) -> None:
    lengths = [(2, 40)] * num_rows
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}
    batch = paged_batch(torch.Generator().manual_seed(0), lengths, dtype=torch.bfloat16, **shape)
    caches = (batch.q, batch.k_cache, batch.v_cache, batch.block_table)
    _call("paged_attention", *caches, batch.query_start_loc, batch.seq_lens, 0.1)


def _multiply(num_rows: int) -> None:
    from quire.ops.linear.plain.tiles import Tiles
    from quire.ops.linear.plain.triton_product import multiply

    weight = torch.zeros((64, 512), dtype=torch.bfloat16)
    multiply(weight[:num_rows], weight, None, torch.bfloat16, Tiles(64, 32, 64, 2, 4, 3))


def _call(name: str, *args: Any) -> None:
    provider = ALL_OPS[name].provider("triton")
    assert provider is not None
    provider.load()(*args)


@pytest.mark.parametrize(
    "call", [_step_inputs, _append_tokens, _apply_updates, _copy_blocks, _attend, _multiply]
)
def test_kernels_are_compiled_once_whatever_the_number_of_rows(call: Callable[[int], None]) -> None:
    """Turns red when a step of another number of rows waits for a compiler while requests do."""
    with launches() as first:
        call(16)
    for count in (3, 4, 20, 24):
        with launches() as others:
            call(count)
        for launch, other in zip(first, others, strict=True):
            assert launch.compiled_as == other.compiled_as


def _some_launches(op: Op) -> list[Launch]:
    """In bfloat16 or integers, the first and the last of each kernel; where one takes long, the
    first alone."""
    provider = op.provider("triton")
    assert provider is not None
    call = provider.load()
    found: dict[str, list[Launch]] = {}
    with launches() as seen:
        for case in op.make_inputs(torch.Generator().manual_seed(0)):
            floats = [arg.dtype for arg in case.args if _is_float_tensor(arg)]
            takes = provider.lacks.isdisjoint(case.kwargs)
            if takes and (not floats or torch.bfloat16 in floats):
                op.apply(call, *case.args, **case.kwargs)
    for launch in seen:
        found.setdefault(launch.kernel.__name__, []).append(launch)
    assert found
    return [
        launch
        for of_kernel in found.values()
        for launch in _distinct(of_kernel[0], of_kernel[0 if op.name in SLOW else -1])
    ]


def _distinct(*of_kernel: Launch) -> list[Launch]:
    return list({launch.label: launch for launch in of_kernel}.values())


def _is_float_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def test_no_cpu_computes_by_the_interpreter_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when a machine without compiled kernels gets the interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    bare = replace(PLATFORM, cpu=replace(PLATFORM.cpu, features=frozenset[str]()))
    assert set(build_op_set(bare).chosen.values()) == {REFERENCE, "numpy"}
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert env.triton_interpreter()
    assert build_op_set(bare).chosen["rms_norm"] == "triton"


@pytest.mark.parametrize(
    ("capability", "hip", "expected"),
    [((9, 0), None, None), ((8, 0), None, None), ((7, 5), None, "SM 75"), ((0, 0), "6.4", None)],
)
def test_which_gpus_are_served(
    capability: tuple[int, int],
    hip: str | None,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns red when a GPU without bfloat16 is given these kernels, or an AMD one is not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    provider = ALL_OPS["rms_norm"].provider("triton")
    assert provider is not None
    reason = provider.unavailable(replace(PLATFORM, device="cuda"))
    assert (reason is None) if expected is None else expected in (reason or "")


def test_importing_the_operations_imports_no_triton() -> None:
    """Turns red when every start pays for kernels that only GPUs use."""
    code = "import sys, quire, quire.ops.registry; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
