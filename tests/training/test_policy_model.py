"""An engine as a module of torch: its forward has the engine's bits, its backward the gradient."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, CompletionOutput, RequestOutput, SamplingParams
from quire.base.errors import ConfigError, RequestError
from quire.hooks import PASS, Answer, Unsent, WatchedSequence
from quire.training import PolicyModel, sampled_log_probs
from tests.engine.test_laws import has_kernels
from tests.image_writer import write_any_checkpoint
from tests.models.families import CASES, Case, write_checkpoint
from tests.small_engines import SMALL, collect_and_freeze

pytestmark = pytest.mark.skipif(not has_kernels(), reason="torch rounds a product by its rows")

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11] * 9]
OPEN = SamplingParams(n=2, temperature=1.0, max_tokens=12, ignore_eos=True, logprobs=0, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("llama")
    write_checkpoint(Case("llama-tied", "llama", {"tie_word_embeddings": True}), found)
    collect_and_freeze()  # what `transformers` has imported, which each new push would visit
    return found


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **{**SMALL, "dtype": request.param}) as made:
        yield made


@pytest.fixture
def policy(llm: LLM) -> PolicyModel:
    return PolicyModel(llm)


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("grpo")


class PassesAll:
    """An output hook, which might change an answer."""

    def watch(self, sequence: WatchedSequence) -> PassesAll:
        return self

    def judge(self, unsent: Unsent) -> Answer:
        return PASS


def drawn(llm: LLM, params: SamplingParams = OPEN) -> list[RequestOutput]:
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return llm.generate(asked, params, use_tqdm=False)


def sequences_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [
        [*(output.prompt_token_ids or ()), *sample.token_ids]
        for output in outputs
        for sample in output.outputs
    ]


def answers_of(outputs: list[RequestOutput]) -> list[CompletionOutput]:
    return [sample for output in outputs for sample in output.outputs]


def small_tokens(answer: CompletionOutput) -> float:
    return float(sum(token < 64 for token in answer.token_ids))


def test_parameters_have_the_names_of_the_checkpoint(policy: PolicyModel) -> None:
    """Turns red when a tied head is trained apart from its embedding."""
    names = dict(policy.named_parameters())
    assert "model.layers.1.self_attn.q_proj.weight" in names
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert set(policy.state_dict()) == set(names)
    assert {each.dtype for each in names.values()} == {torch.float32}


def test_the_loop_is_on_policy_to_the_bit(llm: LLM, grpo: ModuleType) -> None:
    """Turns red when a ratio differs from 1 after an update: the engine drew with other weights
    than the module scores with, or from a stale prefix."""
    policy = PolicyModel(llm)
    before = {name: each.detach().clone() for name, each in policy.named_parameters()}
    version = llm.engine.client.report.weights_version
    done = grpo.train(
        llm, policy, PROMPTS, small_tokens, steps=3, group=2, max_tokens=12, learning_rate=1e-2
    )
    assert [step.ratio_error for step in done] == [0.0] * 3
    assert llm.engine.client.report.weights_version == version + 3
    for name, parameter in policy.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_ratios_leave_1_when_the_weights_do(llm: LLM, policy: PolicyModel) -> None:
    """Turns red when a score comes from old weights, or from what was kept of a draw."""
    outputs = drawn(llm)
    old = torch.cat([sampled_log_probs(answer) for answer in answers_of(outputs)])
    sequences = sequences_of(outputs)
    tails = [values[-12:] for values in policy(sequences)]
    assert torch.equal(torch.cat(tails), old)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.05)
    policy.push()
    moved = torch.cat([values[-12:] for values in policy(sequences)])
    assert (moved - old).abs().mean() > 1e-3


def test_saved_weights_are_the_engine_s(llm: LLM, grpo: ModuleType, tmp_path: Path) -> None:
    """Turns red when an engine opened on the saved weights draws or scores another way, or
    `transformers` reads other weights."""
    from transformers import AutoModelForCausalLM

    policy = PolicyModel(llm)
    grpo.train(llm, policy, PROMPTS, small_tokens, steps=1, group=4, learning_rate=1e-2)
    policy.save(tmp_path / "saved")
    mine = drawn(llm)
    dtype = llm.engine.resolved.settings.dtype
    with LLM(str(tmp_path / "saved"), **{**SMALL, "dtype": dtype}) as other:
        theirs = drawn(other)
    for own, found in zip(answers_of(mine), answers_of(theirs), strict=True):
        assert own.token_ids == found.token_ids
        assert torch.equal(sampled_log_probs(own), sampled_log_probs(found))
    sequences = sequences_of(mine)
    model: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=getattr(torch, dtype)
    ).float()
    for tokens, values in zip(sequences, policy.reference(sequences), strict=True):
        ids = torch.tensor([tokens])
        with torch.no_grad():
            expected = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(values, expected)
    with pytest.raises(ConfigError, match="is there already"):
        policy.save(tmp_path / "saved")


@pytest.mark.parametrize("name", ["qwen3-moe", "gemma2"])
def test_other_families_keep_their_bits(name: str, tmp_path: Path) -> None:
    """Turns red when joined tensors of experts, or norms with an offset, are pushed or saved in
    another way than they are read."""
    write_checkpoint(next(case for case in CASES if case.name == name), tmp_path / "first")
    with LLM(str(tmp_path / "first"), **{**SMALL, "dtype": "bfloat16"}) as llm:
        policy = PolicyModel(llm)
        optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
        torch.cat(policy(sequences_of(drawn(llm)))).mean().backward()
        optimizer.step()
        policy.push()
        outputs = drawn(llm)
        old = torch.cat([sampled_log_probs(answer) for answer in answers_of(outputs)])
        scores = policy(sequences_of(outputs))
        assert torch.equal(torch.cat([values[-12:] for values in scores]), old)
        policy.save(tmp_path / "second")
    with LLM(str(tmp_path / "second"), **{**SMALL, "dtype": "bfloat16"}) as other:
        again = [sampled_log_probs(answer) for answer in answers_of(drawn(other))]
    assert torch.equal(torch.cat(again), old)


def test_an_image_encoder_is_saved_as_it_was(tmp_path: Path) -> None:
    """Turns red when a model that is trained on text alone loses its encoder."""
    source = write_any_checkpoint(tmp_path / "first", "qwen3_vl")
    text = {**SMALL, "limit_mm_per_prompt": {"image": 0}}
    with LLM(str(source), **text) as llm:
        PolicyModel(llm).save(tmp_path / "second")
    wanted, found = (
        load_file(folder / "model.safetensors") for folder in (source, tmp_path / "second")
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_gradients_are_those_of_float64(llm: LLM) -> None:
    """Turns red when the gradient is taken at other weights than the engine's, or strays from the
    formulas by more than float32 does."""
    error = importlib.import_module("benchmarks.quality.gradient_error")
    found = error.errors(llm, sequences_of(drawn(llm)))
    assert found["gradient_error_of_worst_tensor"] < 1e-5
    assert found["reference_from_oracle_max_nats"] < 1e-4
    limit = 1e-4 if llm.engine.resolved.settings.dtype == "float32" else 0.2
    assert 0 < found["engine_from_oracle_max_nats"] < limit


def test_a_backward_in_parts_is_the_same(llm: LLM) -> None:
    """Turns red when a part's gradient is lost, or a factor meets another sequence's token."""
    sequences, gradients = sequences_of(drawn(llm))[::2], list[dict[str, torch.Tensor]]()
    for limit in (1, 35, 4096):  # of 15, 18 and 21 tokens
        policy = PolicyModel(llm, backward_tokens=limit)
        values = policy(sequences)
        factors = torch.randn(sum(map(len, values)), generator=torch.Generator().manual_seed(2))
        (torch.cat(values) * factors).sum().backward()
        gradients.append({n: each.grad.clone() for n, each in policy.named_parameters()})
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-4)


def test_masked_tokens_and_frozen_weights_get_no_gradient(llm: LLM, policy: PolicyModel) -> None:
    policy.model.embed_tokens.weight.requires_grad_(False)
    values = policy(sequences_of(drawn(llm)))
    sum((each * 0).sum() for each in values).backward()
    for name, parameter in policy.named_parameters():
        if name.endswith("embed_tokens.weight"):
            assert parameter.grad is None
        else:
            assert parameter.grad is not None and not parameter.grad.any()


def test_parameters_of_another_dtype_are_rounded(llm: LLM) -> None:
    """Turns red when gradients do not come in the dtype of their parameters."""
    policy = PolicyModel(llm, dtype=torch.bfloat16)
    outputs = drawn(llm)
    values = policy(sequences_of(outputs))
    old = [sampled_log_probs(answer) for answer in answers_of(outputs)]
    assert all(torch.equal(new[-12:], each) for new, each in zip(values, old, strict=True))
    torch.cat(values).sum().backward()
    kinds = {each.grad.dtype for each in policy.parameters() if each.grad is not None}
    assert kinds == {torch.bfloat16}


def test_changes_that_were_not_pushed_are_refused(llm: LLM, policy: PolicyModel) -> None:
    """Turns red when a forward silently scores with older weights than the module has, or a
    backward takes the gradient at newer ones."""
    sequences = [[1, 2, 3]]
    (values,) = policy(sequences)
    with torch.no_grad():
        policy.model.norm.weight.add_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()
    with pytest.raises(RequestError, match=r"Call push\(\)"):
        policy(sequences)
    policy.push()
    policy(sequences)
    llm.update_weights({"model.norm.weight": torch.ones(32)})
    with pytest.raises(RequestError, match=r"Call push\(\)"):
        policy(sequences)
    policy.push()
    with torch.no_grad():
        policy.model.norm.weight[0] = torch.nan
    with pytest.raises(ConfigError, match=r"model\.norm\.weight.*not finite"):
        policy.push()


@pytest.mark.parametrize("tokens", [[], [3], list(range(64))])
def test_lengths_that_cannot_be_scored_are_named(policy: PolicyModel, tokens: list[int]) -> None:
    with pytest.raises(RequestError, match=rf"sequence 1 has {len(tokens)} tokens: give 2 to 63"):
        policy([[1, 2], tokens])


def test_an_unknown_token_is_refused(policy: PolicyModel) -> None:
    with pytest.raises(RequestError, match="4096"):
        policy([[1, 4096]])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quantization": "int8"}, "quantization='int8'"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8'"),
        ({"load_format": "dummy"}, "load_format='dummy'"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode='raw_logits'"),
        ({"output_hooks": [PassesAll()]}, "output hooks"),
    ],
)
def test_engines_that_cannot_be_trained_are_named(
    folder: Path, settings: dict[str, Any], named: str
) -> None:
    with LLM(str(folder), **{**SMALL, **settings}) as llm, pytest.raises(ConfigError, match=named):
        PolicyModel(llm)


def test_bad_arguments_are_named(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"dtype is torch\.float64"):
        PolicyModel(llm, dtype=torch.float64)
    with pytest.raises(ConfigError, match="backward_tokens is 0"):
        PolicyModel(llm, backward_tokens=0)
    with pytest.raises(RequestError, match="logprobs=0"):
        sampled_log_probs(answers_of(drawn(llm, SamplingParams(max_tokens=1)))[0])
