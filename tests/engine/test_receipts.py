"""Receipts of a real engine: the same however an answer is computed, another one for another
answer, and refused where bits cannot be promised."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    LoRARequest,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.bundled import bundled_model_path
from quire.config import env
from quire.config.settings import NumericsSettings
from quire.engine import regenerate as replaying
from quire.engine.provenance import STATED_SETTINGS
from quire.engine.regenerate import receipt_settings
from quire.hooks import PASS, Answer, Unsent, WatchedSequence
from quire.protocol.receipts import Receipt
from tests.engine.test_laws import has_kernels
from tests.lora.adapters import write_adapter
from tests.small_engines import SMALL, Maker, small_engines
from tests.speculation.test_laws import eager_policy

pytestmark = pytest.mark.skipif(not has_kernels(), reason="torch sums rows by their number")

PROMPTS = [
    "import json\n", "The ", "def main(", "Once upon a time there was a small", "1 2 3 4 1 2 3",
    "a", "return x", "A list: one, two, one, two, one,",
]  # fmt: skip
GRAMMAR = StructuredOutputsParams(regex="[a-z]{3,12}")


def params(index: int) -> SamplingParams:
    """Greedy for even requests, seeded for odd ones; each with something of its own."""
    more: dict[str, Any] = {
        1: {"n": 2, "max_tokens": 9},
        2: {"repetition_penalty": 1.2, "stop": ["\n", "e"]},
        3: {"structured_outputs": GRAMMAR, "temperature": 0.9},
        4: {"xtc_probability": 0.5, "xtc_threshold": 0.02, "temperature": 1.0},
        5: {"logit_bias": {40: 2.0}, "top_p": 0.9},
        7: {"dry_multiplier": 1.0, "min_tokens": 4},
    }.get(index, {})
    given = {"temperature": 0.8 * (index % 2), "seed": index, "max_tokens": 16, **more}
    return SamplingParams(**given, deterministic=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, in a folder that may be changed."""
    path: Path = tmp_path_factory.mktemp("receipts") / "model"
    shutil.copytree(bundled_model_path(), path, ignore=shutil.ignore_patterns("*.py", "__*"))
    return path


SETTINGS: dict[str, Any] = {**SMALL, "skip_tokenizer_init": False, "max_model_len": 128}


@pytest.fixture
def make(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LLM]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engines: list[LLM] = []

    def start(model: str = str(folder), **more: Any) -> LLM:
        engines.append(LLM(model, **{**SETTINGS, **more}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="module")
def usual(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine for tests that leave it as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with LLM(str(folder), **SETTINGS) as llm:
            yield llm


def receipt(output: RequestOutput) -> Receipt:
    assert output.error is None, output.error
    assert output.receipt is not None
    output.receipt.check()
    return output.receipt


def run(llm: LLM, prompts: Sequence[str] = PROMPTS) -> list[Receipt]:
    asked = [params(PROMPTS.index(prompt)) for prompt in prompts]
    return [receipt(each) for each in llm.generate(list(prompts), asked, use_tqdm=False)]


def replay(llm: LLM, wanted: Receipt) -> str:
    """The first difference in words."""
    first = llm.llm_engine.take_handles(len(wanted.statement.samples))
    return replaying.regenerate(llm.engine, wanted, first_handle=first)


def one(llm: LLM, **more: Any) -> Receipt:
    given = {"max_tokens": 8, "seed": 3, "temperature": 0.7, "ignore_eos": True, **more}
    asked = SamplingParams(**given, deterministic=True)
    (output,) = llm.generate(PROMPTS[0], asked, use_tqdm=False)
    return receipt(output)


def test_a_receipt_says_what_the_output_says(usual: LLM) -> None:
    asked = SamplingParams(max_tokens=12, logprobs=0, deterministic=True, temperature=0)
    (output,) = usual.generate(PROMPTS[0], asked, use_tqdm=False)
    (sample,), (evidence,) = receipt(output).statement.samples, receipt(output).evidence.samples
    assert evidence.token_ids == output.outputs[0].token_ids
    assert sample.num_tokens == len(evidence.token_ids) == 12
    assert sample.finish_reason == "length"
    assert receipt(output).evidence.prompt_token_ids == output.prompt_token_ids
    assert receipt(output).statement.choice["params"]["temperature"] == 0
    plain = asked.clone(deterministic=False)
    (other,) = usual.generate(PROMPTS[0], plain, use_tqdm=False)
    assert other.receipt is None
    assert other.outputs == output.outputs


def test_nobody_who_did_not_ask_sees_logprobs(usual: LLM) -> None:
    asked = SamplingParams(max_tokens=4, deterministic=True)
    (output,) = usual.generate(PROMPTS[0], asked, use_tqdm=False)
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None
    assert receipt(output).evidence.samples[0].logprobs


def test_a_drawn_seed_is_stated(usual: LLM) -> None:
    """Whoever sends that seed gets the same receipt."""
    drawn = one(usual, seed=None)
    assert one(usual, seed=None).id != drawn.id
    assert one(usual, seed=drawn.statement.choice["seed"]).id == drawn.id


def test_receipts_do_not_say_how_an_answer_was_computed(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a batch, chunked, from the cache, preempted, behind drafts, at any depth."""
    eager_policy(monkeypatch)  # what was measured beside others may make all drafts seem dear
    alone = make(max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=256)
    wanted = run(alone)
    assert len({each.id for each in wanted}) == len(PROMPTS)
    engines: dict[str, dict[str, Any]] = {
        "batched": {"max_num_seqs": 16},
        "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 4, "depth": 3},
        "preempted": {"num_kv_blocks": 24, "max_model_len": 64, "max_num_seqs": 16},
        "swapped": {
            "num_kv_blocks": 24, "max_model_len": 64, "swap_space": "64MiB",
            "preemption_mode": "swap",
        },
        "drafts": {
            "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}', "depth": 1,
        },
        "another block size": {"block_size": 16},
    }  # fmt: skip
    for name, settings in engines.items():
        llm = make(**settings)
        for turn in ("cold", "hit"):
            assert run(llm) == wanted, f"{name}, {turn}"
        stats = llm.engine.client.stats()
        if name in ("preempted", "swapped"):
            assert stats.preempted_total > 0
        if name == "drafts":
            assert stats.accepted_drafts_total > 0
        llm.shutdown()
    for prompt, receipts in zip(PROMPTS, wanted, strict=True):
        assert run(alone, [prompt]) == [receipts]


def test_streams_end_with_the_receipt(usual: LLM) -> None:
    wanted = one(usual)
    for kind in RequestOutputKind:
        asked = SamplingParams(
            max_tokens=8, seed=3, temperature=0.7, ignore_eos=True, output_kind=kind,
            deterministic=True,
        )  # fmt: skip
        last = None
        for last in usual.stream(PROMPTS[0], asked):
            assert (last.receipt is not None) == last.finished
        assert last is not None
        assert last.receipt == wanted, kind


def test_async_engines_give_the_same(usual: LLM, folder: Path) -> None:
    wanted = one(usual)
    asked = SamplingParams(
        max_tokens=8, seed=3, temperature=0.7, ignore_eos=True, deterministic=True
    )

    async def last_output() -> RequestOutput:
        settings = {"dtype": "float32", "quiet": True, "num_kv_blocks": 64, "max_model_len": 128}
        engine = AsyncLLM(str(folder), **settings)
        try:
            return [each async for each in engine.generate(PROMPTS[0], asked, "id")][-1]
        finally:
            engine.shutdown()

    assert asyncio.run(last_output()).receipt == wanted


def test_greedy_answers_state_no_seed(usual: LLM) -> None:
    """A drawn one would tell equal answers apart."""
    assert one(usual, temperature=0, seed=None) == one(usual, temperature=0, seed=7)


def test_beams_have_receipts(usual: LLM) -> None:
    found: list[Receipt] = []
    for _ in range(2):
        rules = BeamSearchParams(beam_width=3, max_tokens=6)
        asked = rules.sampling.clone(deterministic=True)
        rendered = usual.engine.renderer.render_prompt(PROMPTS[0])
        output = usual.llm_engine.add(rendered, asked, _scheduling(), rules.rules)
        while not output.finished:
            usual.llm_engine.run_step()
        found.append(receipt(output))
    assert found[0] == found[1]
    assert len(found[0].statement.samples) == 3
    assert replay(usual, found[0]) == ""


def _scheduling() -> Any:
    from quire import SchedulingParams

    return SchedulingParams()


def test_ranks_are_not_stated_where_they_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.engine.test_rank_invariance import SIZES
    from tests.models.families import Case, write_checkpoint

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model"
    path.mkdir()
    write_checkpoint(Case("dense", "llama", SIZES), path)
    found: dict[tuple[int, bool], Receipt] = {}
    with small_engines(str(path), num_threads=1) as make:
        for ranks, invariant in ((1, True), (2, True), (2, False), (1, False)):
            llm = make(tensor_parallel_size=ranks, rank_invariant=invariant)
            asked = SamplingParams(max_tokens=8, seed=1, ignore_eos=True, deterministic=True)
            outputs = llm.generate({"prompt_token_ids": [5, 6, 7]}, asked, use_tqdm=False)
            found[ranks, invariant] = receipt(outputs[0])
            llm.shutdown()
    assert found[1, True] == found[2, True]
    assert len({each.id for each in found.values()}) == 3


# --- other receipts for other answers -----------------------------------------------------------


def changed(folder: Path, to: Path, edit: Callable[[Path], None]) -> str:
    shutil.copytree(folder, to)
    edit(to)
    return str(to)


def flip_weight(path: Path) -> None:
    """The lowest bit of the last weight."""
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (path / "model.safetensors").write_bytes(content)


def edit_template(path: Path) -> None:
    file = path / "chat_template.jinja"
    file.write_text(file.read_text() + " ")


def edit_tokenizer(path: Path) -> None:
    """The number of one merge, which no prompt here meets."""
    document = json.loads((path / "tokenizer.json").read_text())
    merges = document["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]
    (path / "tokenizer.json").write_text(json.dumps(document))


def edit_config(path: Path) -> None:
    document = json.loads((path / "config.json").read_text())
    document["rms_norm_eps"] = document["rms_norm_eps"] * 1.01
    (path / "config.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (flip_weight, "model.weights"),
        (edit_template, "text.template"),
        (edit_tokenizer, "text.tokenizer"),
        (edit_config, "model.config"),
    ],
)
def test_another_model_is_named(
    usual: LLM,
    make: Maker,
    folder: Path,
    tmp_path: Path,
    edit: Callable[[Path], None],
    field: str,
) -> None:
    wanted = one(usual)
    other = make(model=changed(folder, tmp_path / "other", edit))
    assert one(other).id != wanted.id
    words = replay(other, wanted)
    assert words.startswith(f"{field} is "), words
    assert words.count("\n") == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int8", "activation_bits": 16},
        {"kv_cache_dtype": "bfloat16"},
        {"logprobs_mode": "processed_logprobs"},
    ],
)
def test_another_setting_is_named(usual: LLM, make: Maker, settings: dict[str, Any]) -> None:
    wanted = one(usual)
    name = next(iter(settings))
    assert replay(make(**settings), wanted).startswith(f"engine.{name} is ")


def test_every_setting_of_numerics_is_stated_or_has_its_reason() -> None:
    reasons = {"seed": "weights that it makes", "batch_invariant": "no effect on a CPU"}
    assert set(NumericsSettings.__dataclass_fields__) == {*reasons, *STATED_SETTINGS} & set(
        NumericsSettings.__dataclass_fields__
    )


def test_adapters_are_stated(folder: Path, tmp_path: Path, make: Maker) -> None:
    llm = make(enable_lora=True, max_lora_rank=8)
    plain = one(llm)
    found: list[Receipt] = []
    for seed in (1, 1, 2):
        path = write_adapter(tmp_path / f"a{seed}", folder, ["v_proj"], rank=2, seed=seed)
        asked = SamplingParams(max_tokens=8, seed=3, temperature=0.7, deterministic=True)
        lora = LoRARequest(f"a{seed}", seed, str(path))
        (output,) = llm.generate(PROMPTS[0], asked, use_tqdm=False, lora_request=lora)
        found.append(receipt(output))
    assert found[0].id == found[1].id
    assert len({plain.id, found[0].id, found[2].id}) == 3
    with pytest.raises(RequestError, match="the adapter 'a2' computed the answer"):
        replay(llm, found[2])


# --- replay ---------------------------------------------------------------------------------------


def test_an_engine_makes_all_answers_again(make: Maker) -> None:
    receipts = run(make(logprobs_mode="processed_logprobs"))
    settings = receipt_settings(receipts[0])
    assert settings["dtype"] == "float32"
    assert settings["logprobs_mode"] == "processed_logprobs"
    llm = make(**settings, max_num_seqs=2, block_size=16)
    for each in receipts:
        assert replay(llm, each) == ""
    assert llm.engine.client.has_unfinished is False


def forged(receipt: Receipt, place: int, **changes: Any) -> Receipt:
    """A receipt that agrees with itself, about an answer with another token or log-probability."""
    import msgspec

    document = json.loads(receipt.to_json())
    evidence = document["evidence"]["samples"][0]
    for name, value in changes.items():
        evidence[name][place] = value
    made = msgspec.convert(document, Receipt)
    stated = made.statement
    sample = msgspec.structs.replace(stated.samples[0], chain=made.evidence.samples[0].chain)
    return Receipt.of(msgspec.structs.replace(stated, samples=[sample]), made.evidence)


def test_the_first_other_token_is_named(usual: LLM) -> None:
    wanted = one(usual)
    kept = wanted.evidence.samples[0]
    other = forged(wanted, 4, token_ids=kept.token_ids[4] ^ 1)
    other.check()
    words = replay(usual, other)
    assert words.startswith(f"token 5 of the answer is {kept.token_ids[4]} ")
    assert f"but {kept.token_ids[4] ^ 1} " in words
    assert words.count(f"0x{kept.logprobs[4]}") == 2


def test_another_bit_of_a_logprob_is_named(usual: LLM) -> None:
    wanted = one(usual)
    bits = wanted.evidence.samples[0].logprobs[6]
    flipped = f"{int(bits, 16) ^ 1:08x}"
    words = replay(usual, forged(wanted, 6, logprobs=flipped))
    assert words.startswith("token 7 of the answer is ")
    assert f"0x{bits}" in words
    assert f"0x{flipped}" in words


def test_another_end_is_named(usual: LLM) -> None:
    import msgspec

    wanted = one(usual)
    stated = wanted.statement
    sample = msgspec.structs.replace(stated.samples[0], finish_reason="stop")
    other = Receipt.of(msgspec.structs.replace(stated, samples=[sample]), wanted.evidence)
    assert replay(usual, other) == ("the answer goes on here, but ends by 'stop' in the receipt")


def test_samples_of_one_length_may_end_in_two_ways(usual: LLM) -> None:
    """One draws a stop token at the very end, where the other is cut."""
    for seed in range(20):
        free = one(usual, seed=seed, n=2, temperature=1.5, max_tokens=4)
        first, second = (each.token_ids for each in free.evidence.samples)
        if first[-1] not in [*first[:-1], *second]:
            break
    else:
        pytest.fail("no seed has such samples")
    wanted = one(usual, seed=seed, n=2, temperature=1.5, max_tokens=4, stop_token_ids=[first[-1]])
    assert [each.finish_reason for each in wanted.statement.samples] == ["stop", "length"]
    assert {each.num_tokens for each in wanted.statement.samples} == {4}
    assert replay(usual, wanted) == ""


def test_a_receipt_sets_nothing_that_no_receipt_states(usual: LLM) -> None:
    """It may come from a stranger: a hook would run code of any module."""
    import msgspec

    wanted = one(usual)
    engine = {**wanted.statement.engine, "output_hook": "os:getcwd", "kv_disk": "/", "seed": 5}
    stated = msgspec.structs.replace(wanted.statement, engine=engine)
    settings = receipt_settings(Receipt.of(stated, wanted.evidence))
    assert settings == {**receipt_settings(wanted), "seed": 5}
    assert set(settings) == {*STATED_SETTINGS, "tensor_parallel_size", "seed"}


# --- what cannot be promised --------------------------------------------------------------------


def refusal(llm: LLM, **more: Any) -> str:
    with pytest.raises(RequestError) as caught:
        llm.generate(PROMPTS[0], SamplingParams(deterministic=True, **more), use_tqdm=False)
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
    return str(caught.value)


class Watching:
    """A hook of every request, which lets all pass."""

    def watch(self, sequence: WatchedSequence) -> Watching:
        return self

    def judge(self, unsent: Unsent) -> Answer:
        return PASS


def test_what_cannot_be_promised_is_refused_by_name(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make()
    assert "logits_processors are functions" in refusal(
        llm, logits_processors=[lambda _, logits: logits]
    )
    with pytest.raises(RequestError, match="the prompt comes in pieces"):
        llm.open_prompt(SamplingParams(deterministic=True))
    llm.shutdown()
    assert "torch computes attention" in refusal(make(kv_cache_dtype="fp8"))
    assert "torch computes attention" in refusal(make(attention_backend="reference"))
    monkeypatch.setenv("QUIRE_CPU_ISA", "none")
    assert "no compiled kernels are there" in refusal(make())


def test_models_of_transformers_promise_no_bits(make: Maker) -> None:
    assert "transformers computes the model" in refusal(make(model_impl="transformers"))


def test_hooks_of_every_request_are_refused(make: Maker) -> None:
    assert "output hooks see every answer" in refusal(make(output_hooks=[Watching()]))


def test_an_answer_of_two_models_has_no_receipt(make: Maker) -> None:
    """Later ones state the new weights."""
    llm = make()
    name, size = "model.norm.weight", llm.engine.spec.hidden_size
    new = {name: np.full(size, 1.5, np.float32)}
    before = one(llm)
    asked = SamplingParams(max_tokens=8, ignore_eos=True, deterministic=True)
    stream = llm.stream(PROMPTS[0], asked)
    next(stream)
    llm.update_weights(new)
    outputs = list(stream)
    assert outputs[-1].finished
    assert outputs[-1].receipt is None
    after = one(llm)
    assert before.statement.model["weights"] != after.statement.model["weights"]
    assert before.statement.engine == after.statement.engine
    assert one(llm).id == after.id


def test_an_answer_that_outlives_its_files_has_no_receipt(
    make: Maker, folder: Path, tmp_path: Path
) -> None:
    """Fault: it states the digest of the files that had been read when it began."""
    path = changed(folder, tmp_path / "other", lambda _: None)
    llm = make(model=path)
    asked = SamplingParams(max_tokens=8, ignore_eos=True, deterministic=True)
    stream = llm.stream(PROMPTS[0], asked)
    next(stream)
    llm.sleep(level=2, mode="keep")
    flip_weight(Path(path))
    llm.wake_up()
    (*_, last) = stream
    assert last.finished
    assert last.receipt is None


def test_files_that_were_written_since_the_start_are_refused(
    make: Maker, folder: Path, tmp_path: Path
) -> None:
    """Also behind an earlier receipt, since `wake_up` may read them again."""
    path = changed(folder, tmp_path / "other", lambda _: None)
    llm = make(model=path)
    one(llm)
    flip_weight(Path(path))
    words = "the weight files were written after the engine had read them"
    assert words in refusal(llm)
    llm.sleep(level=2)
    llm.wake_up()
    assert words in refusal(llm)
    (Path(path) / "model.safetensors").unlink()
    assert "the weight files cannot be read any more" in refusal(llm)


def test_weights_are_read_once(
    make: Maker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their digest is kept for the next start; without a deterministic request nobody reads it."""
    from quire.engine import provenance

    calls: list[Path] = []
    digest_files = provenance.digest_files

    def counted(files: Any, memory: Path) -> bytes:
        calls.append(memory)
        return digest_files(files, memory)

    monkeypatch.setattr(provenance, "digest_files", counted)
    llm = make()
    llm.generate(PROMPTS, SamplingParams(max_tokens=2), use_tqdm=False)
    assert not calls
    one(llm)
    one(llm, seed=4)
    assert calls == [env.cache_folder() / "digests.json"]
    assert calls[0].is_file()
