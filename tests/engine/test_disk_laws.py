"""The law "a hit on the disk is cold" for everything that a block's name or its bytes depend on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, LoRARequest, RequestOutput
from tests.engine.test_laws import assert_same, params
from tests.lora.adapters import write_adapter
from tests.models.families import Case, write_checkpoint
from tests.pairs import BY_PAIRS
from tests.small_engines import Maker, small_engines

TOKENS = np.random.default_rng(4).integers(5, 120, 61).tolist()
LAYOUT: dict[str, Any] = {"block_size": 16, "max_model_len": 128, "kv_disk_bytes": "64MB"}
KINDS = ("plain", "salt", "adapter", "media", "states", "ranks", "ranks with states")


class Asking:
    """A kind of engines over one folder, and their requests: `own` ones, and `others`, which must
    share no block with them."""

    def __init__(self, kind: str, folder: Path) -> None:
        family = "lfm2" if "states" in kind else "llama"
        self.model = folder / "model"
        write_checkpoint(Case("it", family, {"vocab_size": 1024}), self.model)
        self.settings: dict[str, Any] = {**LAYOUT, "kv_disk": str(folder / "kv")}
        self.own: dict[str, Any] = {"prompt_token_ids": TOKENS}
        self.others: dict[str, Any] | None = None
        self.adapter: LoRARequest | None = None
        if kind == "salt":
            self.own, self.others = {**self.own, "cache_salt": "one"}, self.own
        elif kind == "adapter":
            path = write_adapter(folder / "adapter", self.model, ("q_proj", "v_proj"))
            self.settings["enable_lora"] = True
            self.adapter, self.others = LoRARequest("it", 1, str(path)), self.own
        elif kind == "media":
            self.settings["enable_prompt_embeds"] = True
            rows = torch.randn(
                (len(TOKENS), self.width), generator=torch.Generator().manual_seed(1)
            )
            self.own = {"prompt_embeds": rows}
            self.others = {"prompt_embeds": torch.cat([rows[:3] * 2, rows[3:]])}
        elif kind.startswith("ranks"):
            self.settings |= {"tensor_parallel_size": 2, "num_threads": 1}

    @property
    def width(self) -> int:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.model).hidden_size

    def ask(self, llm: LLM, *, as_other: bool = False) -> RequestOutput:
        given = self.others if as_other else self.own
        (found,) = llm.generate(
            given,
            params(1, 8),
            use_tqdm=False,
            lora_request=None if as_other else self.adapter,
        )
        llm.engine.client._core.check_invariants()  # type: ignore[attr-defined]
        return found


@pytest.fixture
def asking(kind: str, tmp_path: Path) -> Asking:
    return Asking(kind, tmp_path)


@pytest.fixture
def make(asking: Asking) -> Iterator[Maker]:
    with small_engines(str(asking.model), **asking.settings) as maker:
        yield maker


@BY_PAIRS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_a_hit_on_the_disk_is_cold(
    asking: Asking, make: Maker, kv_cache_dtype: str, weights: str
) -> None:
    if weights == "int4" and "tensor_parallel_size" in asking.settings:
        pytest.skip("two ranks cut the groups of 32 weights that share a scale in so small a model")
    settings: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
    settings["dtype" if weights == "bfloat16" else "quantization"] = weights
    llm = make(**settings)
    cold = asking.ask(llm)
    assert cold.num_cached_tokens == 0
    if kv_cache_dtype == "fp8":  # its attention rounds by the rows of a step
        cold = asking.ask(llm)
        assert cold.num_cached_tokens
    llm.shutdown()
    llm = make(**settings)
    if asking.others is not None:
        assert asking.ask(llm, as_other=True).num_cached_tokens == 0
    warm = asking.ask(llm)
    assert warm.num_cached_tokens == (len(TOKENS) - 1) // 16 * 16
    assert_same([warm], [cold])
    stats = llm.engine.client.stats()
    assert (stats.loads_started_total, stats.blocks_lost_total) == (1, 0)
