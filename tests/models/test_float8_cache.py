"""A cache in float8 holds the nearest numbers, and the model hardly notices."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.families import random_sequences
from tests.models.harness import PagedModel
from tests.packed_writer import e4m3, write_pair

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.bundled import bundled_model_path
from quire.entrypoints.cli.main import main
from quire.ops.kv.rope_and_write_kv.write_kv import narrow

DTYPES = ("float8_e4m3fn", "float8_e5m2")


def numbers_of(dtype: str) -> np.ndarray:
    """All finite numbers of the dtype in float64, in the order of their codes."""
    if dtype == "float8_e4m3fn":
        return e4m3(np.arange(0x7F)).astype(np.float64)
    codes = np.arange(0x7C)
    exponent, mantissa = codes >> 2, (codes & 3) / 4
    return np.where(exponent == 0, mantissa * 2.0**-14, (1 + mantissa) * 2.0 ** (exponent - 15.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_holds_the_nearest_number(dtype: str) -> None:
    """Ties go to the even one, what is too large becomes the largest, NaN stays."""
    table = numbers_of(dtype)
    middles = (table[1:] + table[:-1]) / 2
    largest = table[-1]
    given = np.concatenate([table, middles, middles * 1.001, middles * 0.999, [largest * 3, 1e30]])
    given = given.astype(np.float32)
    wide = given.astype(np.float64)
    distance = np.abs(wide[:, None] - table[None, :])
    best = distance == distance.min(1, keepdims=True)
    even = best & (np.arange(len(table)) % 2 == 0)
    choice = np.where(even.any(1) & (best.sum(1) > 1), even.argmax(1), best.argmax(1))
    wanted = np.where(wide > largest, largest, table[choice])
    for sign in (1, -1):
        found = narrow(torch.from_numpy(given * np.float32(sign)), getattr(torch, dtype)).float()
        assert torch.equal(found, torch.from_numpy((wanted * sign).astype(np.float32)))
    assert narrow(torch.tensor([torch.nan]), getattr(torch, dtype)).float().isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [0.0, 700.0])
def test_logits_are_close(dtype: str, bias: float, tmp_path: Path) -> None:
    """Also with biases beyond the largest number, which the cache does without."""
    folder = write_pair(tmp_path, None, lambda _: None)[1]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("k_proj.bias"):
            tensors[name][5] += bias
    save_file(tensors, file)
    sequences = random_sequences((11, 1, 6))
    sequences = {seq: [token % 96 for token in tokens] for seq, tokens in sequences.items()}
    wanted = PagedModel(folder, "reference", 64).step(sequences)
    model = PagedModel(folder, "reference", 64, kv_dtype=dtype)
    found = model.step(sequences)
    spread = max(float(logits.std()) for logits in wanted.values())
    for seq, logits in wanted.items():
        off = float((found[seq] - logits).pow(2).mean().sqrt())
        assert 0 < off < (0.1 if dtype == "float8_e4m3fn" else 0.2) * spread
    first = PagedModel(folder, "reference", 64, kv_dtype=dtype)
    for start in range(0, 11, 3):
        chunk = first.step({0: sequences[0][start : start + 3]})[0]
        torch.testing.assert_close(chunk, found[0][start : start + 3], rtol=0, atol=2e-2)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_the_engine_takes_it(name: str) -> None:
    """Preemption, prefix hits and forks move bytes, whatever they mean."""
    prompts = [{"prompt_token_ids": [5, 6, 7, 8] * 4}, {"prompt_token_ids": [9, 8]}]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found: list[list[list[int]]] = []
    for more in ({"num_kv_blocks": 64}, {"num_kv_blocks": 8, "block_size": 4}):
        with LLM(
            quiet=True, skip_tokenizer_init=True, kv_cache_dtype=name, max_model_len=32, **more
        ) as llm:
            for _ in range(2):  # the second time from cached prefixes
                outputs = llm.generate(prompts, greedy, use_tqdm=False)
                found.append([output.outputs[0].token_ids for output in outputs])
    assert all(answers == found[0] for answers in found)


def test_the_plan_has_half_of_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {}
    for name in ("bfloat16", "fp8"):
        model = str(bundled_model_path())
        assert main(["plan", model, "--dtype", "bfloat16", "--kv-cache-dtype", name, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        sizes[plan["settings"]["kv_cache_dtype"]] = plan["memory"]["kv_per_token"]
    assert sizes["bfloat16"] == 2 * sizes["float8_e4m3fn"]


def large_keys(folder: Path, scales: dict[str, torch.Tensor]) -> Path:
    """Keys of about 3,000, with queries that are as much smaller, and scales by name below each
    layer's attention."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in list(tensors):
        if name.endswith(".self_attn.k_proj.weight"):
            tensors[name] *= 256
        elif name.endswith((".self_attn.q_proj.weight", ".self_attn.q_proj.bias")):
            tensors[name] /= 256
            prefix = name[: name.index("self_attn.") + len("self_attn.")]
            tensors |= {prefix + kind: scale.clone() for kind, scale in scales.items()}
    save_file(tensors, file)
    return folder


def prompt_logprobs(folder: Path, kv_cache_dtype: str) -> torch.Tensor:
    """Return the log-probabilities of a prompt's tokens, float32 [N]."""
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(
        str(folder), quiet=True, skip_tokenizer_init=True, kv_cache_dtype=kv_cache_dtype
    ) as llm:
        output = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]
    entries = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([entry[token].logprob for token, entry in entries])


SPELLINGS = [
    {"k_scale": torch.tensor(16.0), "v_scale": torch.tensor(0.5)},
    {"k_proj.k_scale": torch.tensor([16.0]), "v_proj.v_scale": torch.tensor([0.5]).bfloat16()},
    {"k_proj.output_scale": torch.tensor(16.0).half(), "v_proj.output_scale": torch.tensor(0.5)},
    {"kv_scale": torch.tensor(16.0)},
]


@pytest.mark.parametrize("scales", SPELLINGS, ids=lambda scales: next(iter(scales)))
def test_scales_of_the_checkpoint(scales: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Catches scales that are read and forgotten, on the way in or out."""
    paths = (tmp_path / "with", tmp_path / "without")
    scaled, plain = (write_pair(path, None, lambda _: None)[1] for path in paths)
    large_keys(scaled, scales)
    large_keys(plain, {})
    wanted = prompt_logprobs(plain, "float32")
    assert torch.equal(prompt_logprobs(scaled, "float32"), wanted)
    with_scales = (prompt_logprobs(scaled, "fp8") - wanted).abs().mean()
    without = (prompt_logprobs(plain, "fp8") - wanted).abs().mean()
    assert with_scales < without / 2


def test_impossible_scales(tmp_path: Path) -> None:
    for index, scale in enumerate((torch.tensor(0.0), torch.tensor(torch.nan), torch.ones(2))):
        path = tmp_path / str(index)
        folder = large_keys(write_pair(path, None, lambda _: None)[1], {"k_scale": scale})
        with pytest.raises(ConfigError, match=r"self_attn.k_scale' .*one positive number"):
            prompt_logprobs(folder, "fp8")
