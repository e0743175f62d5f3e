"""Requests with adapters answer as models into which these are merged."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lora.adapters import merge, write_adapter
from tests.models.families import Case, write_checkpoint

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, RequestError
from quire.compute.worker.weight_stash import WeightStash, reachable_tensors
from quire.config.adapters import digest_of
from quire.lora.request import LoRARequest
from quire.protocol.adapters import AdapterRef

LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES = {
    "llama": (Case("llama", "llama"), LLAMA),
    "qwen3": (Case("qwen3", "qwen3"), LLAMA),
    "gemma3": (Case("gemma3", "gemma3_text"), LLAMA),
    "lfm2": (
        Case("lfm2", "lfm2"),
        ("in_proj", "q_proj", "k_proj", "v_proj", "out_proj", "w1", "w2", "w3"),
    ),
    "qwen3.5": (
        Case("qwen3.5", "qwen3_5_text"),
        (*LLAMA, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    ),
    "granite-4": (
        Case("granite-4", "granitemoehybrid"),
        (*LLAMA[:4], "in_proj", "out_proj", "input_linear", "output_linear"),
    ),
    "mamba2": (Case("mamba2", "mamba2"), ("in_proj", "out_proj")),
    "minicpm3": (
        Case("minicpm3", "minicpm3"),
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "up_proj", "down_proj"),
    ),
    "gpt2": (Case("gpt2", "gpt2"), ("c_attn", "c_proj", "c_fc")),
    "opt": (Case("opt", "opt"), ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")),
}
PROMPTS = ([5, 9, 100, 31, 7], [77, 12], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5] * 2, [42] * 7)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1, min_tokens=10)


def engine(model: Path, **settings: Any) -> LLM:
    return LLM(
        str(model), dtype="float32", skip_tokenizer_init=True, quiet=True, max_model_len=64,
        num_kv_blocks=64, **settings,
    )  # fmt: skip


def answers(llm: LLM, prompts: Sequence[Any], **more: Any) -> list[list[tuple[int, float]]]:
    """Tokens and their log-probabilities."""
    found: list[list[tuple[int, float]]] = []
    for output in llm.generate(list(prompts), GREEDY, use_tqdm=False, **more):
        (best,) = output.outputs
        assert best.logprobs is not None
        pairs = zip(best.token_ids, best.logprobs, strict=True)
        found.append([(token, entry[token].logprob) for token, entry in pairs])
    return found


def assert_close(got: Any, expected: Any, tolerance: float = 1e-4) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in theirs]
        for (_, left), (_, right) in zip(mine, theirs, strict=True):
            assert math.isclose(left, right, abs_tol=tolerance)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(FAMILIES["llama"][0], folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Three, of ranks 2, 8 and 3; the last changes two modules alone."""
    folder = tmp_path_factory.mktemp("adapters")
    asked = ((2, LLAMA), (8, LLAMA), (3, ("v_proj", "up_proj")))
    found: list[LoRARequest] = []
    for i, (rank, names) in enumerate(asked):
        path = write_adapter(folder / f"a{i}", base, names, rank=rank, seed=i)
        found.append(LoRARequest(path.name, i + 1, str(path)))
    return found


@pytest.fixture(scope="module")
def llm(base: Path) -> Iterator[LLM]:
    with engine(base, enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
        yield llm


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_answers_as_the_merged_model(family: str, tmp_path: Path) -> None:
    case, names = FAMILIES[family]
    write_checkpoint(case, tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", tmp_path / "base", names)
    merged = merge(tmp_path / "merged", tmp_path / "base", folder, {"": 8 / 4})
    with engine(tmp_path / "base", enable_lora=True) as llm:
        plain = answers(llm, PROMPTS)
        got = answers(llm, PROMPTS, lora_request=LoRARequest("a", 1, str(folder)))
        assert answers(llm, PROMPTS) == plain, "it left something in the base model"
    with engine(tmp_path / "base") as llm:
        assert answers(llm, PROMPTS) == plain, "rows without adapters keep their bits"
    with engine(merged) as llm:
        assert_close(got, answers(llm, PROMPTS))
    assert got != plain


def test_ranks_and_scales_by_module(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(
        tmp_path / "a", base, LLAMA, rank=4, use_rslora=True, rank_pattern={"q_proj": 2},
        alpha_pattern={r"layers\.\d+\.mlp\.down_proj": 32},
    )  # fmt: skip
    scales = {"q_proj": 8 / math.sqrt(2), "down_proj": 32 / 2, "": 8 / 2}
    merged = merge(tmp_path / "merged", base, folder, scales)
    with engine(base, enable_lora=True) as llm:
        got = answers(llm, PROMPTS, lora_request=LoRARequest("a", 1, str(folder)))
    with engine(merged) as llm:
        assert_close(got, answers(llm, PROMPTS), 1e-3)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_batch_of_many_equals_each_alone(
    base: Path, adapters: list[LoRARequest], depth: int
) -> None:
    """Three adapters over two slots, and rows without; few blocks, so that some are preempted."""
    with engine(base, enable_lora=True, max_loras=2, max_lora_rank=8, depth=depth) as llm:
        alone = [
            answers(llm, [prompt], lora_request=lora)[0]
            for prompt in PROMPTS
            for lora in (None, *adapters)
        ]
    asked = [(prompt, lora) for prompt in PROMPTS for lora in (None, *adapters)]
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "depth": depth}
    with LLM(
        str(base), dtype="float32", skip_tokenizer_init=True, quiet=True, max_model_len=64,
        num_kv_blocks=9, block_size=8, **settings,
    ) as llm:  # fmt: skip
        together = answers(llm, [p for p, _ in asked], lora_request=[lora for _, lora in asked])
    assert together == alone


def test_prefixes_are_not_shared_between_adapters(llm: LLM, adapters: list[LoRARequest]) -> None:
    prompt = list(range(3, 43))
    for lora in (None, adapters[0], adapters[1]):
        first, second = (
            llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=lora)[0] for _ in range(2)
        )
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
        assert first.lora_request == lora


def test_a_pin_of_the_base_model_serves_no_adapter(llm: LLM, adapters: list[LoRARequest]) -> None:
    """Fault: a request reads K/V of other weights, and answers wrongly without a word."""
    prompt = [9, *range(3, 43)]
    cold = answers(llm, [prompt], lora_request=adapters[0])
    llm.reset_prefix_cache()
    pin = llm.pin_prefix({"prompt_token_ids": prompt[:20]})
    assert answers(llm, [prompt], lora_request=adapters[0]) == cold
    assert [held.hits for held in llm.pinned_prefixes()] == [0]
    llm.unpin_prefix(pin)


def test_new_weights_under_an_old_name(llm: LLM, base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, LLAMA, seed=7)
    lora, prompt = LoRARequest("same", 9, str(folder)), list(range(3, 43))
    before = answers(llm, [prompt], lora_request=lora)
    write_adapter(folder, base, LLAMA, seed=8)
    output = llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=lora)[0]
    assert output.num_cached_tokens == 0
    assert answers(llm, [prompt], lora_request=lora) != before


class LossyStash(WeightStash):
    """Loses what is written until the weights are restored."""

    def __init__(self, model: object) -> None:
        self._copies = [(each, each.clone()) for each in reachable_tensors(model)]

    @torch.inference_mode()
    def restore(self) -> None:
        for tensor, copy in self._copies:
            tensor.copy_(copy)


@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_sleep_and_wake_keep_adapters(
    place: str, base: Path, adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter may also come in the sleep. Fault: it was written into memory that had been
    emptied, as a GPU's is at level 1, or it kept the weights alive at level 2.

    gpu: the sleep of a GPU, on a CPU, whose packed weights cannot be emptied."""
    with engine(base, enable_lora=True, max_loras=1, max_lora_rank=8) as llm:
        before = [answers(llm, PROMPTS, lora_request=each) for each in adapters[:2]]
        worker: Any = llm.engine.client._core._executor._worker  # type: ignore[attr-defined]
        refs = [AdapterRef(each.name, each.path, digest_of(Path(each.path))) for each in adapters]
        weights = [weakref.ref(each) for each in reachable_tensors(worker._loaded.model)]
        with monkeypatch.context() as patch:
            if place == "gpu":
                patch.setattr(worker, "_device", torch.device("meta"))
                patch.setattr("quire.compute.worker.worker.WeightStash", LossyStash)
            llm.sleep(1 if place == "gpu" else 2)
        assert any(each() is not None for each in weights) == (place == "gpu")
        worker.put_adapter(0, worker.read_adapter(refs[0]))  # in place of the one that was there
        llm.wake_up()
        assert answers(llm, PROMPTS, lora_request=adapters[1]) == before[0]
        worker.put_adapter(0, worker.read_adapter(refs[1]))
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm, PROMPTS, lora_request=adapters[1]) == before[1]


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"init_lora_weights": "pissa"}, "base model was changed"),
        ({"r": 5}, "rank 4, but the configuration says 5"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"some_new_key": 3}, "some_new_key=3"),
    ],
)
def test_adapters_that_mean_something_else_are_refused(
    llm: LLM, base: Path, tmp_path: Path, break_it: dict[str, Any], words: str
) -> None:
    folder = write_adapter(tmp_path / "a", base, LLAMA, **break_it)
    with pytest.raises(RequestError, match=words):
        llm.generate([1, 2], GREEDY, lora_request=LoRARequest("bad", 1, str(folder)))
    assert len(answers(llm, [[1, 2]])[0]) == 10


def test_adapters_of_another_base_are_refused(llm: LLM, tmp_path: Path) -> None:
    for name, case, modules in (
        ("wider", Case("wider", "llama", {"hidden_size": 64}), LLAMA),
        ("gpt2", *FAMILIES["gpt2"]),
    ):
        write_checkpoint(case, tmp_path / name)
        folder = write_adapter(tmp_path / f"{name}-adapter", tmp_path / name, modules)
        with pytest.raises(RequestError, match="another base model"):
            llm.generate([1, 2], GREEDY, lora_request=LoRARequest("bad", 1, str(folder)))


def test_folders_without_an_adapter(llm: LLM, base: Path, tmp_path: Path) -> None:
    pickled = write_adapter(tmp_path / "pickled", base, LLAMA)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    large = write_adapter(tmp_path / "large", base, LLAMA, rank=9)
    for folder, words in (
        (tmp_path / "nowhere", "no such folder"),
        (pickled, "pickle file"),
        (large, "max_lora_rank=9"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate([1, 2], GREEDY, lora_request=LoRARequest("bad", 1, str(folder)))


def test_one_bad_adapter_of_a_list_fails_alone(llm: LLM, adapters: list[LoRARequest]) -> None:
    bad = LoRARequest("bad", 5, "/nowhere/at/all")
    first, second = llm.generate(
        [[1, 2], [1, 2]], GREEDY, use_tqdm=False, lora_request=[bad, adapters[0]]
    )
    assert "no such folder" in (first.error or "")
    assert second.error is None


def test_an_engine_without_lora_says_so(base: Path, adapters: list[LoRARequest]) -> None:
    with engine(base) as llm, pytest.raises(RequestError, match="enable_lora"):
        llm.generate([1, 2], GREEDY, lora_request=adapters[0])
    with pytest.raises(ConfigError, match="max_loras"):
        engine(base, enable_lora=True, max_loras=0)


def test_adapters_of_matrices_that_queries_absorb_are_refused(tmp_path: Path) -> None:
    """Would catch an adapter of `kv_b_proj` that loads and changes nothing."""
    base = tmp_path / "base"
    write_checkpoint(FAMILIES["minicpm3"][0], base)
    folder = write_adapter(tmp_path / "adapter", base, ("kv_b_proj", "o_proj"))
    with engine(base, enable_lora=True) as llm, pytest.raises(RequestError, match="kv_b_proj"):
        llm.generate([1, 2], GREEDY, lora_request=LoRARequest("bad", 1, str(folder)))
