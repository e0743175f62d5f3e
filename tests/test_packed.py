"""A quantized folder is a model like any other: `LLM` needs no setting for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.entrypoints.cli.main import main
from tests.engine.test_captured import captured_forward, recorded
from tests.engine.test_laws import has_kernels
from tests.packed_writer import FORMATS, Written, all_but_head, write_pair
from tests.pairs import BY_PAIRS

BY_NAME = {each.name: each for each in FORMATS}
PROMPTS = [{"prompt_token_ids": ids} for ids in ([3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1, 8])]
OPTIONS: dict[str, Any] = {"quiet": True, "skip_tokenizer_init": True, "num_kv_blocks": 64}


def answers(folder: Path, **more: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), **OPTIONS, **more) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", ["fp8-blocks", "squeezellm-4-sparse", "nf4-nested"])
def test_answers_are_those_of_the_numbers(name: str, tmp_path: Path) -> None:
    """Formats of tables, whose activations keep their bits."""
    chosen = BY_NAME[name]
    packed, plain, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    assert answers(packed) == answers(plain)


@pytest.mark.parametrize(
    "name",
    [
        *("awq-gemm-g32", "gptq-3", "gptq-4-act-order", "compressed-w8a8", "compressed-w4a8"),
        *("compressed-w8a16-groups", "mxfp4-blocks", "int8-bnb"),
    ],
)
def test_activations_of_16_bits_give_the_answers_of_the_numbers(name: str, tmp_path: Path) -> None:
    """Integers in memory, with the law of the formats above. Turns red when a format of integers
    rounds activations anyway, or its numbers are others than those that were stored."""
    chosen = BY_NAME[name]
    packed, plain, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    assert answers(packed, activation_bits=16) == answers(plain)


@pytest.mark.skipif(not has_kernels(), reason="plain torch is not captured")
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *((name, None) for name in ("fp8-blocks", "fp8-outputs", "squeezellm-3", "nf4-nested")),
        *(("gptq-4-act-order", bits) for bits in (None, 16)),
        *(("compressed-w8a8", 16), ("compressed-w4a8", 16)),
    ],
)
def test_steps_are_captured(name: str, bits: int | None, tmp_path: Path) -> None:
    """Catches a format that computes in torch between kernels, and a replay that reads weights,
    orders of inputs or outputs of the step that was captured."""
    chosen = BY_NAME[name]
    folder, _, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), **OPTIONS, activation_bits=bits) as llm:
        assert captured_forward(llm).graphs is not None
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert recorded(llm)
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == answers(folder, enforce_eager=True, activation_bits=bits)


@pytest.mark.parametrize(
    "name", ["awq-gemm-g32", "gptq-3", "gptq-4-act-order", "compressed-w8a8", "fp8-blocks", "nf4"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [None, 16])
@BY_PAIRS
def test_batched_is_alone(name: str, dtype: str, bits: int | None, tmp_path: Path) -> None:
    """Formats with kernels, whose rows do not depend on their batch."""
    chosen = BY_NAME[name]
    folder, _, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    settings = {"dtype": dtype, "activation_bits": bits}
    together = answers(folder, **settings)
    assert answers(folder, **settings, max_num_seqs=1) == together
    assert answers(folder, **settings, max_num_batched_tokens=3, max_num_seqs=3) == together


def test_bits_that_depend_on_the_batch_are_not_called_invariant(tmp_path: Path) -> None:
    chosen = BY_NAME["awq-gemm-g16"]
    folder, _, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    with pytest.raises(ConfigError, match=r"batch_invariant=True.*awq.*quantization='int8'"):
        answers(folder, batch_invariant=True)
    assert answers(folder, batch_invariant=True, quantization="int8")
    chosen = BY_NAME["fp8-blocks"]
    folder, _, _ = write_pair(tmp_path / "fp8", chosen.settings, all_but_head(chosen.write))
    assert answers(folder, batch_invariant=has_kernels())


@pytest.mark.skipif(not has_kernels(), reason="plain torch is refused before")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("compressed-w4a8", "weight_scale"),
        ("compressed-w8a16-groups", "weight_scale"),
        ("gptq-4-act-order", "g_idx"),
    ],
)
def test_what_a_kernel_cannot_hold_is_not_called_invariant(
    name: str, kind: str, tmp_path: Path
) -> None:
    """Catches a promise by headers alone: scales of 24 bits, and groups of unequal sizes, are seen
    as they are read."""
    chosen = BY_NAME[name]

    def write(outputs: int, inputs: int, random: np.random.Generator) -> Written:
        tensors, numbers = chosen.write(outputs, inputs, random)
        if kind == "weight_scale":
            tensors[kind] = tensors[kind].float() * 1.0001
        else:
            tensors[kind][:40] = 0
        return tensors, numbers

    folder, _, _ = write_pair(tmp_path, chosen.settings, all_but_head(write))
    with pytest.raises(ConfigError, match=r"batch_invariant=True.*widened.*quantization='int8'"):
        answers(folder, batch_invariant=True)


def test_the_plan_names_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a report of 16 bits for a model in 4."""
    chosen = BY_NAME["awq-gemm-g32"]
    folder, _, _ = write_pair(tmp_path, chosen.settings, all_but_head(chosen.write))
    assert main(["plan", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "awq  14 matrices by linear_blocks" in told
    assert "activation_bits" in told and "8  products of integers are fastest" in told
    assert main(["plan", str(folder), "--activation-bits", "16"]) == 0
    assert "16  as asked; integers become float32 for each product" in capsys.readouterr().out
    assert main(["plan", str(folder), "--activation-bits", "4"]) == 2
    assert "activation_bits cannot be 4. Give one of: 8, 16" in capsys.readouterr().err
    assert main(["plan", str(folder), "--quantization", "int8", "--json"]) == 0
    decisions = json.loads(capsys.readouterr().out)["decisions"]
    [reason] = [item["reason"] for item in decisions if item["name"] == "quantization"]
    assert reason == "as asked; made of awq"
