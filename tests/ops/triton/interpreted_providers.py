"""Every provider in Triton equals the reference, run in Triton's interpreter.

Runs with TRITON_INTERPRET=1, which must be set before Triton is imported: from
tests/ops/test_triton.py, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.ops.test_rope_and_write_kv import test_fused_equals_one_after_the_other as fused
from tests.ops.triton.interpreter import repair_interpreter
from tests.profiles import SCALE

from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, Case, Op, check_provider

repair_interpreter()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, over NaN and inf
PLATFORM = detect_platform()
# Every n-th case of slow operations, and all of the last: each shape and each dtype, not each pair.
# A soak takes twice as many.
SAMPLED = {
    "linear_int8": (5, 0),
    "linear_int4": (7, 0),
    "paged_attention": (8, 4),
    "rope_and_write_kv": (2, 0),
    "draw": (3, 0),
    "edit_logits": (2, 0),
    "token_logprobs": (5, 0),
}
OPS = [op for op in ALL_OPS.values() if op.provider("triton") is not None]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_kernel_equals_the_reference(op: Op) -> None:
    """Turns red when a kernel reads beyond a row, rounds twice, or drops a tail."""
    provider, make = op.provider("triton"), op.make_inputs
    assert provider is not None
    assert provider.unavailable(PLATFORM) is None
    step, last = SAMPLED.get(op.name, (1, 0))
    step *= 1 if SCALE > 1 else 2

    def sampled(generator: torch.Generator) -> Iterator[Case]:
        cases = list(make(generator))
        kept = len(cases) - last
        return iter([*cases[:kept:step], *cases[kept:]])

    op = replace(op, make_inputs=sampled)
    report = check_provider(op, provider)
    assert report.num_cases > 0
    assert not report.failures, "\n".join(report.failures)


def test_an_id_outside_the_table_gives_no_numbers() -> None:
    """Turns red when a token that is not there reads memory that is none of the table's."""
    provider = ALL_OPS["embedding"].provider("triton")
    assert provider is not None
    call = provider.load()
    rows = call(torch.tensor([2, -1, 3, 0]), torch.ones(3, 5))
    assert rows.isnan().all(dim=1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("tokens", "group", "head_dim", "rotary", "normed", "dtype", "broken"),
    [
        (6, 2, 64, 1.0, True, torch.bfloat16, False),
        (6, 1, 30, 0.5, True, torch.float32, True),
        (3, 7, 80, 0.0, False, torch.float16, True),
        (0, 1, 8, 1.0, False, torch.float32, False),
    ],
)
def test_fused_equals_one_after_the_other(
    tokens: int,
    group: int,
    head_dim: int,
    rotary: float,
    normed: bool,
    dtype: torch.dtype,
    broken: bool,
    cache_dtype: torch.dtype,
) -> None:
    """To the bit, NaN included: see tests/ops/test_rope_and_write_kv.py."""
    fused.hypothesis.inner_test(
        ALL_OPS["rope_and_write_kv"].provider("triton"),
        tokens=tokens,
        kv_heads=2,
        group=group,
        head_dim=head_dim,
        rotary=rotary,
        normed=normed,
        dtype=dtype,
        cache_dtype=cache_dtype,
        block_size=16,
        broken=broken,
        seed=0,
    )
