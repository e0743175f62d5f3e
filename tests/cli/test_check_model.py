"""`quire check-model` tells a right model from a wrong one, and where the wrong one goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.compute.attention import ReferenceAttention
from quire.compute.models.llama import LlamaBlock, LlamaModel
from quire.entrypoints.bench import model_check
from quire.entrypoints.cli.main import main
from tests.models.families import CASES, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("llama-head-dim", tmp_path_factory.mktemp("llama"))


def write(name: str, folder: Path) -> Path:
    write_checkpoint(next(case for case in CASES if case.name == name), folder)
    return folder


def passes(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["check-model", *arguments, "--num-tokens", "23", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (status == 0)
    return status, {each["name"]: each for each in report["passes"]}


def test_what_is_not_compared_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: one rank without drafts was compared, and called equal."""
    assert main(["check-model", str(folder), "-tp", "2"]) == 2
    assert "tensor_parallel_size has no part" in capsys.readouterr().err


def test_a_right_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-model", str(folder), "--num-tokens", "23"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "logits equal those of transformers"
    assert [text.count(f"{name} ") for name in ("prefill", "decode", "chunked")] == [1, 1, 1]


@pytest.mark.parametrize("name", ["gemma3", "opt-350m", "mpt", "granite-moe"])
def test_blocks_of_all_kinds_are_followed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red when a right model counts as one whose stream differs: a tolerance of nothing has
    all passes compared layer by layer."""
    write(name, tmp_path)
    assert passes(capsys, str(tmp_path))[0] == 0
    _, found = passes(capsys, str(tmp_path), "--tolerance", "0")
    assert max(each["layer_error"] for each in found.values()) < 1e-4


def test_the_first_layer_that_differs_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LlamaBlock._feed_forward

    def wrong(self: LlamaBlock, x: torch.Tensor) -> torch.Tensor:
        return right(self, x) * (1.01 if self.wanted._is_last else 1.0)

    monkeypatch.setattr(LlamaBlock, "_feed_forward", wrong)
    status, found = passes(capsys, str(folder))
    assert status == 1
    assert [each["layer"] for each in found.values()] == [1, 1, 1]
    assert main(["check-model", str(folder), "--num-tokens", "23"]) == 1
    assert "first behind layer 1 of 0 to 1" in capsys.readouterr().out


def test_what_follows_the_layers_is_told_apart(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LlamaModel.logits
    monkeypatch.setattr(LlamaModel, "logits", lambda self, hidden: right(self, hidden) + 1.0)
    _, found = passes(capsys, str(folder))
    assert [each["layer"] for each in found.values()] == [2, 2, 2]
    assert main(["check-model", str(folder), "--num-tokens", "23"]) == 1
    assert "in the final norm, the head" in capsys.readouterr().out


def test_a_fault_of_one_pass_alone(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when tokens are not fed one at a time over what was written before."""
    right = ReferenceAttention.run

    def wrong(self: ReferenceAttention, q: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        out = right(self, q, *rest, **more)
        return out * 0.5 if rest[2].max_query_len == 1 else out

    monkeypatch.setenv("QUIRE_CPU_ISA", "none")
    monkeypatch.setattr(ReferenceAttention, "run", wrong)
    _, found = passes(capsys, str(folder))
    assert (found["prefill"]["layer"], found["decode"]["layer"]) == (None, 0)


def test_a_model_that_transformers_computes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = passes(capsys, str(folder), "--model-impl", "transformers")
    assert status == 0
    _, found = passes(capsys, str(folder), "--model-impl", "transformers", "--quantization", "int8")
    assert all(each["layer"] == 0 for each in found.values())


def test_a_quantized_model_differs_by_as_much_as_it_is_allowed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert passes(capsys, str(folder), "--quantization", "int8")[0] == 1
    assert passes(capsys, str(folder), "--quantization", "int8", "--tolerance", "0.2")[0] == 0


def test_what_cannot_be_compared(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["check-model", str(folder), "--num-tokens", "65"]) == 2
    assert "must be at most 64" in capsys.readouterr().err
    write("mistral-window", tmp_path)
    assert main(["check-model", str(tmp_path), "--num-tokens", "5"]) == 0
    assert "windows of 6 tokens" in capsys.readouterr().out
    monkeypatch.setattr(model_check, "has_transformers", lambda: False)
    assert main(["check-model", str(folder)]) == 2
    assert "which is not in quire's environment" in capsys.readouterr().err
