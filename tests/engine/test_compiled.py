"""An engine whose norms, activations and sums are the work of torch's compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch._dynamo

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from tests.models.families import CASES, write_checkpoint

PROMPTS = ([5, 6, 7, 8, 9, 10], [11, 12, 13])


def engine(folder: Path, **settings: object) -> LLM:
    return LLM(
        model=str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=64, **settings
    )


def greedy(llm: LLM) -> list[list[int]]:
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    write_checkpoint(next(case for case in CASES if case.name == "llama"), model)
    return model


def test_it_generates_the_same(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Turns red when the setting changes nothing, or something else than who computes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    torch._dynamo.reset()  # what other tests have compiled would be kept nowhere
    with engine(folder) as llm:
        expected = greedy(llm)
    assert "by compiled" not in capsys.readouterr().err
    with engine(folder, torch_compile=True) as llm:
        assert "rms_norm, add_rms_norm" in capsys.readouterr().err.split(" by compiled")[0]
        assert greedy(llm) == expected
    assert any(path.is_file() for path in (tmp_path / "compiled").rglob("*"))


def test_it_does_not_go_with_batch_invariance(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"batch_invariant=True and torch_compile=True do not go"):
        engine(folder, torch_compile=True, batch_invariant=True)
