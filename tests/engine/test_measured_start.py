"""An engine that sizes its KV pool by what was measured, on a CPU that plays a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.compute.worker import worker as worker_module

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5 + i] * (9 + i)} for i in range(4)]
TAKEN = 10**9


class Meter:
    """A device that the model has taken TAKEN bytes of, and steps nothing more."""

    def __init__(self, left: int) -> None:
        """left: bytes for graphs and the KV pool."""
        self.total = self.free = int((TAKEN + left) / 0.9) + 1

    def tensors(self) -> int:
        return TAKEN // 2

    def held(self) -> int:
        return TAKEN

    def watch(self) -> None:
        pass

    def most_held(self) -> int:
        return TAKEN

    def num_refused(self) -> int:
        return 0


def make(monkeypatch: pytest.MonkeyPatch, num_pages: float, **settings: Any) -> LLM:
    """An engine on a device with memory for so many KV blocks."""
    base = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "dtype": "float32", **settings}
    page = 16 * 6 * 1024  # of the bundled model in float32
    meter = Meter(int(num_pages * page))
    monkeypatch.setattr(worker_module, "_own_memory", lambda *_: meter)
    return LLM(skip_tokenizer_init=True, enforce_eager=True, **base)


def test_the_pool_is_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scheduler has to plan with the blocks that there are, not with those of the plan."""
    with LLM(quiet=True, skip_tokenizer_init=True, dtype="float32", max_model_len=128) as plain:
        expected = [each.outputs[0].token_ids for each in plain.generate(PROMPTS, GREEDY)]
        assert plain.engine.resolved.layout.page_bytes == 16 * 6 * 1024
    with make(monkeypatch, 11.5, max_model_len=128) as llm:
        assert llm.engine.resolved.settings.num_kv_blocks == 11
        outputs = llm.generate(PROMPTS * 3, GREEDY)
        assert [each.outputs[0].token_ids for each in outputs] == expected * 3
        assert llm.engine.client.stats().num_blocks == 11
    said = capsys.readouterr().err
    assert "measured: weights 476.8 MiB, process 476.8 MiB" in said
    assert "176 tokens" in said  # of 11 blocks


def test_a_shorter_context_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests up to the planned context would never fit."""
    with make(monkeypatch, 5.5, quiet=True) as llm:
        assert llm.engine.resolved.settings.max_model_len == 80
        assert llm.engine.resolved.settings.num_kv_blocks == 5
        long, short = llm.generate([{"prompt_token_ids": [7] * 90}, PROMPTS[0]], GREEDY)
        assert long.error is not None
        assert "80" in long.error
        assert short.error is None


def test_a_context_that_was_asked_for_is_not_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Give at most max_model_len=80"):
        make(monkeypatch, 5.5, max_model_len=128, quiet=True)
