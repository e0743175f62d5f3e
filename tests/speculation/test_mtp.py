"""MTP layers: drafts on = drafts off to the bit, and guesses as published."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, RequestOutput, SamplingParams
from quire.base.errors import ConfigError
from quire.compute.runner.drafting.model import LayerDrafter
from quire.config.checkpoint import read_checkpoint
from quire.config.families.reader import read_model_spec
from quire.config.memory.plan import weight_bytes
from quire.config.settings import EngineSettings
from quire.config.speculation.draft_model import find_draft
from quire.config.speculation.mtp import MTPDraft
from quire.engine.convert import convert_model
from quire.lora.request import LoRARequest
from quire.plan.speculation.policy import DraftPolicy
from tests.engine import test_recurrent_drafts as recurrent_drafts
from tests.engine.test_latent_models import attention_by_kernels
from tests.engine.test_laws import assert_same
from tests.engine.test_recurrent_drafts import PROMPTS
from tests.engine.test_recurrent_models import prompt_of
from tests.lora.adapters import write_adapter
from tests.models.test_latent_packed import write_pair
from tests.pairs import LAWS_BY_PAIRS
from tests.small_engines import Maker, small_engines
from tests.speculation.head_reference import longest_first
from tests.speculation.mtp_reference import (
    NUM_LAYERS,
    Tensors,
    as_gguf,
    change_tensors,
    write_mtp,
)
from tests.speculation.test_heads import Watched, skips_every_third_step
from tests.speculation.test_laws import DEPTHS, eager_policy, totals

pytestmark = LAWS_BY_PAIRS

FAMILIES = ("deepseek_v3", "glm4_moe_lite", "glm4_moe", "qwen3_next", "qwen3_5_text")
SETTINGS: dict[str, Any] = {"block_size": 16, "max_model_len": 256, "num_kv_blocks": 128}
MTP = {"method": "mtp", "num_speculative_tokens": 3}
LONG = {"max_position_embeddings": 256}
START = f"model.layers.{NUM_LAYERS}."


def sampling() -> list[SamplingParams]:
    return recurrent_drafts.sampling(32)


def run(llm: LLM, prompts: Sequence[list[int]] = PROMPTS) -> list[RequestOutput]:
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(asked, sampling()[: len(prompts)], use_tqdm=False)


def same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    assert_same(found, expected, exact=attention_by_kernels())


class Written:
    """A checkpoint whose MTP layer is right now and then, and answers without drafts."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = folder
        self.oracle = write_mtp(family, folder, LONG)
        with small_engines(str(folder), **SETTINGS) as make:
            self.expected = run(make(enable_prefix_caching=False))
        sequences = [
            [*(result.prompt_token_ids or []), *output.token_ids]
            for result in self.expected
            for output in result.outputs
        ]
        self.oracle.fit(folder, sequences)


@pytest.fixture(scope="module", params=FAMILIES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def make(written: Written) -> Iterator[Maker]:
    with small_engines(str(written.folder), **SETTINGS) as maker:
        yield maker


# --- laws -----------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_drafts_change_no_bit(
    depth: int, eager: bool, make: Maker, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one batch and alone. In the second run the prompts come from the cache."""
    llm = make(depth=depth, enforce_eager=eager, speculative_config=MTP)
    eager_policy(monkeypatch)
    same(run(llm), written.expected)
    assert 30 < totals(llm).accepted < totals(llm).drafts
    same(run(llm), written.expected)
    alone = llm.generate({"prompt_token_ids": PROMPTS[0]}, sampling()[0], use_tqdm=False)
    same(alone, written.expected[:1])


@DEPTHS
@pytest.mark.parametrize("budget", [9, 17, 64])
def test_preempted_and_chunked_ones_change_no_bit(
    depth: int, budget: int, make: Maker, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    few: dict[str, Any] = {"num_kv_blocks": 16, "max_model_len": 160}
    llm = make(depth=depth, max_num_batched_tokens=budget, speculative_config=MTP, **few)
    eager_policy(monkeypatch)
    same(run(llm), written.expected)
    assert llm.engine.client.stats().preempted_total > 0
    assert totals(llm).drafts > 10


def test_the_policy_changes_no_bit(make: Maker, written: Written) -> None:
    """Steps with drafts and steps that a capture replays follow each other."""
    same(run(make(speculative_config=MTP)), written.expected)


def test_an_engine_that_has_slept_drafts_as_before(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(speculative_config=MTP)
    eager_policy(monkeypatch)
    asked = {"prompt_token_ids": PROMPTS[0]}
    before = llm.generate(asked, sampling()[0], use_tqdm=False)
    accepted = totals(llm).accepted
    llm.sleep(2)
    llm.wake_up()
    same(llm.generate(asked, sampling()[0], use_tqdm=False), before)
    assert totals(llm).accepted == 2 * accepted > 0


# --- beside other settings ------------------------------------------------------------------------


def test_ranks_draft_together(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when ranks guess different tokens, or one has K/V of the layer that are another's
    heads: then few drafts are right, or the ranks stand still."""
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 1}
    llm = make(**ranks, speculative_config=MTP)
    with monkeypatch.context() as without:
        without.setattr(DraftPolicy, "may_take", lambda *_: False)
        without.setattr(
            DraftPolicy, "counts", lambda _, tokens, chances, offered, most: [0] * len(offered)
        )
        expected = run(llm)
    assert totals(llm).accepted == 0
    llm.reset_prefix_cache()
    eager_policy(monkeypatch)
    same(run(llm), expected)
    assert totals(llm).accepted > 30
    same(run(llm), expected)


@pytest.mark.parametrize("written", FAMILIES[:1], indirect=True)
def test_ranks_forget_drafts_that_one_could_not_make(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: one rank goes on from entries of the layer that another has not, so that the sums of
    the next guess are of different tokens, and ranks end up with different drafts."""
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 1}
    llm = make(**ranks, speculative_config=MTP)
    eager_policy(monkeypatch)
    count, turns = LayerDrafter._count, itertools.count()

    def breaks(drafter: LayerDrafter, *entries: Any) -> None:
        if next(turns) % 5 == 1:
            raise RuntimeError("out of luck")
        count(drafter, *entries)

    monkeypatch.setattr(LayerDrafter, "_count", breaks)  # of the rank in this process
    found = run(llm, PROMPTS[:2])
    assert next(turns) > 10
    monkeypatch.setattr(LayerDrafter, "_count", count)
    same(run(llm, PROMPTS[:2]), found)
    assert totals(llm).accepted > 10


def test_adapters_change_answers_and_no_guess(
    make: Maker, written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a guess is made with what the model's last step left behind of adapters."""
    folder = write_adapter(tmp_path / "a", written.folder, ("o_proj",), strength=0.1)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)  # as PEFT knows the model: without the layer
    save_file({n: t for n, t in tensors.items() if START not in n and ".mtp." not in n}, file)
    adapter = LoRARequest("a", 1, str(folder))
    mixed = [adapter, None, adapter, None, None]
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    plain, llm = make(enable_lora=True), make(enable_lora=True, speculative_config=MTP)
    eager_policy(monkeypatch)
    expected = plain.generate(asked, sampling(), use_tqdm=False, lora_request=mixed)
    for _ in range(2):
        found = llm.generate(asked, sampling(), use_tqdm=False, lora_request=mixed)
        same(found, expected)
    assert totals(llm).accepted > 20
    same(run(llm), written.expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_made_up_layers_draft(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their files are not read. Drafts of noise are verified as any."""
    write_mtp(family, tmp_path, LONG)
    stored = draft_of(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    made_up = draft_of(tmp_path, load_format="dummy")
    assert 0.5 < made_up.weight_bytes(None) / stored.weight_bytes(None) < 2
    settings = {**SETTINGS, "load_format": "dummy"}
    with small_engines(str(tmp_path), **settings) as make:
        expected = run(make(), PROMPTS[:2])
        llm = make(speculative_config=MTP)
        eager_policy(monkeypatch)
        same(run(llm, PROMPTS[:2]), expected)
        assert totals(llm).drafts > 10


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_text"])
def test_converted_layers_guess_as_before(
    family: str, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when `quire convert` leaves the layer out, or stores it otherwise than loading with
    that quantization would."""
    source, out = tmp_path / "source", tmp_path / "out"
    write_mtp(family, source, LONG)
    convert_model(source, tmp_path / "plain")
    convert_model(source, out, quantization)
    before = guesses_of(tmp_path / "plain", monkeypatch, quantization=quantization)
    found = guesses_of(out, monkeypatch)
    assert len(before.seen) > 20
    assert found.seen == before.seen


# --- guesses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("stored", ["folder", "gguf"])
@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_equal_the_published_computation(
    family: str, stored: str, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights, every guess of every step: turns red for states or K/V of other tokens than
    the row's, after chunks of prompts, rejected drafts, steps without drafts and prefix hits; and
    for a guess after the first one that goes on from another state."""
    oracle = write_mtp(family, tmp_path, LONG)
    place = tmp_path if stored == "folder" else as_gguf(family, tmp_path, oracle.config)
    skips_every_third_step(monkeypatch)
    settings = {**SETTINGS, "enforce_eager": not captured, "speculative_config": MTP}
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in (*PROMPTS, prompt_of(150, 9))]
    with small_engines(str(place), **settings) as make:
        llm = make()
        watched = Watched(llm)
        llm.generate(asked, greedy, use_tqdm=False)
        llm.generate(asked[-1:], greedy, use_tqdm=False)
    num_compared, places = 0, [0, 0, 0]
    seen = longest_first(watched.seen)
    wanted = oracle.guesses([(tokens, len(drafts)) for tokens, drafts in seen])
    for (_, drafts), guesses in zip(seen, wanted, strict=True):
        for place, (draft, right) in enumerate(zip(drafts, guesses, strict=True)):
            if right.margin < 2e-3:
                break  # either may win
            assert draft == right.token
            num_compared += 1
            places[place] += 1
    assert len(watched.seen) > 60
    assert num_compared > 2 * len(watched.seen)
    assert min(places) > 30


def test_acceptance_is_counted_by_position(
    make: Maker, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First drafts are right most often, as the layer was made for them."""
    llm = make(speculative_config=MTP)
    eager_policy(monkeypatch)
    run(llm)
    found = totals(llm)
    assert sum(found.accepted_at) == found.accepted
    first, second, third = found.accepted_at[:3]
    assert first > second > third > 0


def guesses_of(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantization: str | None = None,
    replaced: Tensors | None = None,
) -> Watched:
    """Guesses after some prompts. replaced: weights to replace, by name."""
    eager_policy(monkeypatch)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]]
    with small_engines(str(folder), **SETTINGS, speculative_config=MTP) as make:
        llm = make(quantization=quantization)
        if replaced:
            llm.update_weights(replaced)
        watched = Watched(llm)
        llm.generate(asked, greedy, use_tqdm=False)
    return watched


def test_layers_in_fp8_guess_as_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek publishes the block of the layer in blocks of FP8, and its projection wider."""
    write_mtp("deepseek_v3", tmp_path, LONG)
    packed, plain = (guesses_of(each, monkeypatch) for each in write_pair(tmp_path, (16, 8)))
    assert len(packed.seen) > 20
    assert packed.seen == plain.seen


def test_a_layer_beside_the_text_part_of_a_model_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5 is published with an image encoder, its text part below `language_model`, and the
    layer below neither."""
    write_mtp("qwen3_5_text", tmp_path, LONG)
    plain = guesses_of(tmp_path, monkeypatch)

    def nested(tensors: Tensors) -> Tensors:
        return {
            name.replace("model.", "model.language_model.", 1)
            if name.startswith("model.")
            else name: tensor
            for name, tensor in tensors.items()
        }

    change_tensors(tmp_path, nested)
    assert len(plain.seen) > 20
    assert guesses_of(tmp_path, monkeypatch).seen == plain.seen


def test_replaced_weights_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when weights of the layer stay as they are on disk, or others go with them."""
    oracle = write_mtp("deepseek_v3", tmp_path, LONG)
    name = f"{START}eh_proj.weight"
    before = guesses_of(tmp_path, monkeypatch)
    changed = guesses_of(tmp_path, monkeypatch, replaced={name: -oracle.tensors[name]})
    change_tensors(tmp_path, lambda tensors: {**tensors, name: -tensors[name]})
    assert guesses_of(tmp_path, monkeypatch).seen == changed.seen
    assert changed.seen != before.seen


# --- memory ---------------------------------------------------------------------------------------


def draft_of(folder: Path, **settings: Any) -> MTPDraft:
    options = {"model": str(folder), "speculative_config": MTP, **settings}
    checkpoint = None if settings.get("load_format") == "dummy" else read_checkpoint(folder)
    found = find_draft(
        EngineSettings.from_options(options), read_model_spec(folder), folder, checkpoint
    )
    assert isinstance(found, MTPDraft)
    return found


def test_the_layer_is_counted_only_where_it_guesses(tmp_path: Path) -> None:
    """Turns red when the plan of a model has room for a layer that nobody loads, or when that of
    one with drafts has none for its K/V and the states that it reads."""
    write_mtp("deepseek_v3", tmp_path, LONG)
    checkpoint, spec = read_checkpoint(tmp_path), read_model_spec(tmp_path)
    own = [each for name, each in checkpoint.tensors.items() if name.startswith(START)]
    rest = checkpoint.num_bytes - sum(each.num_bytes for each in own)
    assert weight_bytes(spec, checkpoint) == rest
    draft = draft_of(tmp_path)
    assert draft.weight_bytes(None) == sum(each.num_bytes for each in own)
    assert draft.weight_bytes("int8") < draft.weight_bytes(None) / 2
    with small_engines(str(tmp_path), **SETTINGS) as make:
        plain, drafted = make(), make(speculative_config=MTP)
        layout = plain.engine.resolved.layout
        assert draft.page_bytes(layout) == 16 * (24 + 8 + 32) * 4
        fixed = [each.engine.resolved.memory.fixed for each in (plain, drafted)]
        assert fixed[1].weights - fixed[0].weights >= draft.weight_bytes(None)
        assert f"MTP layer of {tmp_path.name}" in str(drafted.engine.resolved.decisions)


def test_copies_of_the_models_tensors_are_left_out(tmp_path: Path) -> None:
    """Published files have the table of tokens and the head a second time."""
    write_mtp("deepseek_v3", tmp_path, LONG)
    before = draft_of(tmp_path).weight_bytes(None)
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    change_tensors(
        tmp_path,
        lambda tensors: {**tensors, **{START + name: torch.zeros(128, 32) for name in copies}},
    )
    assert draft_of(tmp_path).weight_bytes(None) == before
    with small_engines(str(tmp_path), **SETTINGS, speculative_config=MTP) as make:
        run(make(), PROMPTS[:1])


def test_the_indexer_of_the_layer_is_not_counted(tmp_path: Path) -> None:
    """Fault: in fewer bits, the plan took what DeepSeek V3.2's indexer saves off other weights."""
    write_mtp("deepseek_v3", tmp_path, LONG)
    formats = (None, "int8", "int4")
    before = [draft_of(tmp_path).weight_bytes(each) for each in formats]
    name = f"{START}self_attn.indexer.wq_b.weight"
    change_tensors(tmp_path, lambda tensors: {**tensors, name: torch.zeros(64, 32)})
    assert [draft_of(tmp_path).weight_bytes(each) for each in formats] == before
    with small_engines(str(tmp_path), **SETTINGS, speculative_config=MTP) as make:
        run(make(), PROMPTS[:1])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_layers_guess(
    quantization: str, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager_policy(monkeypatch)
    llm = make(quantization=quantization, speculative_config=MTP)
    same(run(llm), run(make(quantization=quantization)))
    assert totals(llm).accepted > 10


# --- what is refused ------------------------------------------------------------------------------


def without(folder: Path, name: str) -> None:
    change_tensors(folder, lambda tensors: {k: v for k, v in tensors.items() if k != name})


def test_checkpoints_without_the_layer_are_refused(tmp_path: Path) -> None:
    write_mtp("deepseek_v3", tmp_path, LONG)
    without(tmp_path, f"{START}eh_proj.weight")
    with pytest.raises(ConfigError, match=rf"has no MTP layer \({START}eh_proj.weight is missing"):
        draft_of(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=r"has no MTP layer.*take a checkpoint that has one"):
        draft_of(tmp_path)
    with pytest.raises(ConfigError, match="its settings name none"):
        draft_of(tmp_path, load_format="dummy")


def test_layers_of_another_shape_are_refused(tmp_path: Path) -> None:
    write_mtp("deepseek_v3", tmp_path, LONG)
    name = f"{START}eh_proj.weight"
    change_tensors(tmp_path, lambda tensors: {**tensors, name: torch.zeros(32, 32)})
    settings = {**SETTINGS, "skip_tokenizer_init": True, "speculative_config": MTP}
    with pytest.raises(ConfigError, match=rf"'{name}' has shape \[32, 32\]"):
        LLM(str(tmp_path), **settings)
    change_tensors(tmp_path, lambda tensors: {**tensors, f"{START}other.weight": torch.ones(2)})
    with pytest.raises(ConfigError, match=rf"'{START}other.weight'\) is in the weight files, but"):
        LLM(str(tmp_path), **settings)
    without(tmp_path, f"{START}self_attn.o_proj.weight")
    with pytest.raises(ConfigError, match=rf"'{START}self_attn.o_proj.weight'\) is missing"):
        LLM(str(tmp_path), **settings)
