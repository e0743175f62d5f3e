"""A reference compiled by torch equals the reference, for any number of rows, and is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config

from quire.base.errors import ConfigError
from quire.config import env
from quire.ops import ALL_OPS
from quire.ops.check import compare
from quire.ops.compiled import compiled_provider
from quire.ops.operation import Case


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    env.keep_compiled()
    torch._dynamo.reset()
    return tmp_path / "quire" / "torch_compile"


def cases(name: str) -> list[Case]:
    """One to many rows."""
    generator = torch.Generator().manual_seed(1)

    def rows(count: int) -> torch.Tensor:
        return torch.randn(count, 96, generator=generator).bfloat16()

    weight = torch.randn(96, generator=generator).bfloat16()
    arguments = {
        "add_rms_norm": lambda n: (rows(n), rows(n), weight, 1e-6),
        "layer_norm": lambda n: (rows(n), weight, weight, 1e-5),
        "activation_and_mul": lambda n: (rows(n), "silu"),
    }
    return [Case(f"{n} rows", arguments[name](n)) for n in (5, 1, 40)]


@pytest.mark.parametrize("name", ["add_rms_norm", "layer_norm", "activation_and_mul"])
def test_compiled_equals_the_reference(name: str) -> None:
    op = ALL_OPS[name]
    compiled = compiled_provider(op).load()
    counters.clear()
    for case in cases(name):
        assert compare(op, compiled, case) is None
    made = counters["inductor"]
    assert made["fxgraph_cache_miss"] + made["fxgraph_cache_hit"] == 2, "one row, and several"


def test_what_was_compiled_is_kept(cache: Path) -> None:
    x = torch.randn(3, 8)
    counters.clear()
    compiled_provider(ALL_OPS["add"]).load()(x, x)
    assert counters["inductor"]["fxgraph_cache_miss"] == 1
    assert any(path.is_file() for path in cache.rglob("*"))
    torch._dynamo.reset()
    counters.clear()
    compiled_provider(ALL_OPS["add"]).load()(x, x)
    assert counters["inductor"]["fxgraph_cache_hit"] == 1


def test_the_users_own_place_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    env.keep_compiled()
    import os

    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"


def test_a_compiler_that_does_not_work_is_said_so() -> None:
    from quire.base.platform import detect_platform
    from quire.ops import build_op_set
    from quire.ops.compiled import with_compiled

    ops = build_op_set(detect_platform())
    broken = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with broken, pytest.raises(ConfigError, match=r"torch_compile=True, but torch's compiler"):
        with_compiled(ops, torch.device("cpu"))
