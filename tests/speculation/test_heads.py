"""Medusa and EAGLE heads: drafts on = drafts off to the bit, and guesses as published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, RequestOutput, SamplingParams
from quire.base.errors import ConfigError
from quire.compute.models.heads.weights import read_head_weights
from quire.config.hf import RawConfig
from quire.config.speculation.heads import state_layers
from quire.protocol import EngineRequest
from quire.protocol.step import StepPlan
from tests.engine.test_laws import assert_same
from tests.pairs import LAWS_BY_PAIRS
from tests.speculation.head_reference import Target, guesses, longest_first
from tests.speculation.head_writer import (
    HEAD_METHODS,
    config_of,
    fit_head,
    random_head,
    write_head,
)
from tests.speculation.shallow import BUNDLED
from tests.speculation.test_laws import (
    DEPTHS,
    PROMPTS,
    SETTINGS,
    Engines,
    eager_policy,
    engines,
    expected,
    run,
    totals,
    within,
)

pytestmark = LAWS_BY_PAIRS

__all__ = ["engines", "expected"]  # fixtures

LAYERS = "eagle_aux_hidden_state_layer_ids"
BY_METHOD = pytest.mark.parametrize("method", HEAD_METHODS)
Fitted = Callable[[str], Path]


def config(method: str, folder: Path, count: int = 3) -> dict[str, Any]:
    return {"method": method, "model": str(folder), "num_speculative_tokens": count}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(BUNDLED)


@pytest.fixture(scope="module")
def fitted(
    target: Target, expected: list[RequestOutput], tmp_path_factory: pytest.TempPathFactory
) -> Fitted:
    """Heads that are right now and then, by method; each is made once."""
    made: dict[str, Path] = {}
    sequences = [
        [*(result.prompt_token_ids or []), *output.token_ids]
        for result in expected
        for output in result.outputs
    ]

    def of_method(method: str) -> Path:
        if method not in made:
            folder = tmp_path_factory.mktemp(method)
            made[method] = write_head(folder, method, fit_head(method, target, sequences))
        return made[method]

    return of_method


# --- laws -----------------------------------------------------------------------------------------


@BY_METHOD
@DEPTHS
def test_heads_change_no_bit(
    depth: int,
    method: str,
    fitted: Fitted,
    expected: list[RequestOutput],
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone and batched, forked, with edits, stops, a grammar and cached prefixes."""
    llm = engines.make(depth=depth, speculative_config=config(method, fitted(method)))
    eager_policy(monkeypatch)
    assert_same(run(llm), expected, exact=True)
    assert 30 < totals(llm).accepted < totals(llm).drafts
    assert_same(run(llm), expected, exact=True)


@BY_METHOD
@DEPTHS
@pytest.mark.parametrize("swap_space", ["0", "16MiB"], ids=["recomputed", "swapped"])
def test_preempted_requests_end_the_same(
    depth: int,
    method: str,
    swap_space: str,
    fitted: Fitted,
    expected: list[RequestOutput],
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few: dict[str, Any] = {"num_kv_blocks": 41, "swap_space": swap_space}
    llm = engines.make(depth=depth, speculative_config=config(method, fitted(method)), **few)
    eager_policy(monkeypatch)
    assert_same(run(llm), expected, exact=True)
    core: Any = llm.engine.client
    assert core._core.stats().preempted_total > 0
    assert totals(llm).accepted > 5


@BY_METHOD
def test_the_policy_changes_no_bit(
    method: str, fitted: Fitted, expected: list[RequestOutput], engines: Engines
) -> None:
    """Steps with drafts and steps that a capture replays follow each other."""
    llm = engines.make(speculative_config=config(method, fitted(method)))
    assert_same(run(llm), expected, exact=True)


@BY_METHOD
@DEPTHS
def test_requests_that_come_with_output_are_drafted_for(
    depth: int, method: str, fitted: Fitted, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines.make(depth=depth, speculative_config=config(method, fitted(method)))
    eager_policy(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    (whole,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    tokens, client = np.array(whole.outputs[0].token_ids, np.int32), llm.engine.client
    before = totals(llm).accepted
    prompt = np.array(whole.prompt_token_ids, np.int32)
    client.add(EngineRequest("cut", 10**6, prompt, params, 3, output_token_ids=tokens[:11]))
    found = tokens[:11].tolist()
    while client.has_unfinished:
        found += client.step().token_ids.tolist()
    assert found == tokens.tolist()
    assert totals(llm).accepted > before


@BY_METHOD
def test_an_engine_that_has_slept_drafts_as_before(
    method: str, fitted: Fitted, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines.make(speculative_config=config(method, fitted(method)))
    eager_policy(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    before = llm.generate(PROMPTS[0], params, use_tqdm=False)
    accepted = totals(llm).accepted
    llm.sleep(2)
    llm.wake_up()
    assert_same(llm.generate(PROMPTS[0], params, use_tqdm=False), before, exact=True)
    assert totals(llm).accepted == 2 * accepted > 0


@BY_METHOD
def test_heads_that_break_cost_no_request(
    method: str,
    fitted: Fitted,
    expected: list[RequestOutput],
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm = engines.make(speculative_config=config(method, fitted(method)))
    eager_policy(monkeypatch)

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("quire.compute.models.heads.medusa.MedusaHeads.logits", broken)
    monkeypatch.setattr("quire.compute.models.heads.eagle.EagleHead.logits", broken)
    assert_same(run(llm), expected, exact=True)
    assert "steps go on without drafts" in caplog.text
    assert totals(llm).drafts == 0  # none was made


# --- guesses --------------------------------------------------------------------------------------


class Watched:
    """Records what a drafter guesses: tokens of a row, and its guesses after them."""

    def __init__(self, llm: LLM) -> None:
        client: Any = llm.engine.client
        drafter = client._core._executor._worker._assembly.runner._drafter
        self.seen: list[tuple[list[int], list[int]]] = []
        propose, rows = drafter.propose, client._core._executor._worker._assembly.runner._rows

        def watched(plan: StepPlan) -> None:
            propose(plan)
            for slot in np.flatnonzero(rows.num_drafts).tolist():
                end, count = int(rows.num_tokens[slot]), int(rows.num_drafts[slot])
                tokens = rows.token_ids[slot]
                self.seen.append((tokens[:end].tolist(), tokens[end : end + count].tolist()))

        drafter.propose = watched


@BY_METHOD
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_guesses_equal_the_published_computation(
    captured: bool,
    method: str,
    target: Target,
    tmp_path: Path,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random weights, every guess of every step: turns red for states or K/V of other tokens than
    the row's, after chunks of prompts, rejected drafts, steps without drafts and prefix hits."""
    tensors = random_head(method)
    folder = write_head(tmp_path, method, tensors)
    llm = engines.make(
        dtype="float32",
        enforce_eager=not captured,
        speculative_config=config(method, folder),
    )
    skips_every_third_step(monkeypatch)
    watched = Watched(llm)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [*PROMPTS, " ".join(PROMPTS * 2)]  # the last is longer than a step
    llm.generate(prompts, params, use_tqdm=False)
    llm.generate(prompts[-1:], params, use_tqdm=False)
    assert len(watched.seen) > 60
    num_compared = 0
    seen = longest_first(watched.seen)
    asked = [(tokens, len(drafts)) for tokens, drafts in seen]
    wanted = guesses(method, tensors, config_of(method), target, asked)
    for (_, drafts), found in zip(seen, wanted, strict=True):
        for draft, right in zip(drafts, found, strict=True):
            if right.margin < 2e-3:
                break  # either may win
            assert draft == right.token
            num_compared += 1
    assert num_compared > 2 * len(watched.seen)


def skips_every_third_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify all that is offered in two steps of three, and nothing in the third, however often it
    was wrong."""
    eager_policy(monkeypatch)
    monkeypatch.setattr("quire.plan.scheduler.drafts.guesses.Guesses._rest", lambda *_: None)
    steps = iter(range(10**6))

    def counts(_: object, *args: Any) -> list[int]:
        offered, most = args[2], args[3]
        return [0] * len(offered) if next(steps) % 3 == 2 else within(offered, most)

    monkeypatch.setattr("quire.plan.speculation.policy.DraftPolicy.counts", counts)


def test_medusa_in_the_layout_of_other_engines_is_the_same(
    tmp_path: Path, target: Target, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = random_head("medusa")
    renamed = {
        name.replace(".0.linear.", ".layers.0.").replace(".1.", "."): tensor
        for name, tensor in tensors.items()
    }
    renamed = {
        f"blocks.{name}" if "layers" in name else f"lm_heads.{name}": tensor
        for name, tensor in renamed.items()
    }
    folder = write_head(tmp_path, "medusa", {})
    (folder / "medusa_lm_head.pt").unlink()
    save_file(renamed, folder / "model.safetensors")
    llm = engines.make(dtype="float32", speculative_config=config("medusa", folder, 8))
    eager_policy(monkeypatch)
    watched = Watched(llm)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm.generate(PROMPTS[0], params, use_tqdm=False)
    tokens, drafts = watched.seen[0]
    assert len(drafts) == 4  # there are no more heads
    (wanted,) = guesses("medusa", tensors, {}, target, [(tokens, 4)])
    assert drafts == [each.token for each in wanted]
    assert 0 < totals(llm).drafts <= 4 * totals(llm).rows  # only what was made is counted


@pytest.mark.parametrize(
    ("named", "layers"),
    [
        ({}, (2, 16, 29)),
        ({LAYERS: [3, 9, 31]}, (3, 9, 31)),
        ({"eagle_config": {LAYERS: [1, 15, 28]}}, (2, 16, 29)),
        ({LAYERS: [3, 9, 31], "eagle_config": {LAYERS: [1, 15, 28]}}, (3, 9, 31)),
    ],
)
def test_layers_of_eagle3_are_named_by_inputs_and_in_eagle_config_by_outputs(
    named: dict[str, Any], layers: tuple[int, ...]
) -> None:
    """Turns red when a list of SGLang's kind is read one layer too early: the published ones for 32
    layers are those that are taken where there is none."""
    assert state_layers(RawConfig(named, "config.json"), 32) == layers


def test_layers_that_the_model_lacks_are_refused() -> None:
    named = {"eagle_config": {LAYERS: [1, 15, 31]}}
    with pytest.raises(ConfigError, match=r"names the layers \[1, 15, 31\]"):
        state_layers(RawConfig(named, "config.json"), 32)


# --- what is refused ------------------------------------------------------------------------------


def start(method: str, folder: Path, **more: Any) -> None:
    LLM(None, **{**SETTINGS, "speculative_config": config(method, folder), **more}).shutdown()


@BY_METHOD
def test_weights_of_another_model_are_refused(method: str, tmp_path: Path) -> None:
    tensors = random_head(method)
    name = next(iter(tensors))
    folder = write_head(tmp_path, method, {**tensors, name: tensors[name][:-1]})
    with pytest.raises(ConfigError, match=f"'.*{name.split('.')[-2]}.*' has shape"):
        start(method, folder)
    folder = write_head(tmp_path, method, {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(ConfigError, match="has no tensor"):
        start(method, folder)
    folder = write_head(tmp_path, method, {**tensors, "other.thing": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"nothing reads, such as 'other\.thing'"):
        start(method, folder)
    folder = write_head(tmp_path, method, {**tensors, name: tensors[name] * torch.nan})
    with pytest.raises(ConfigError, match="not finite"):
        start(method, folder)


def test_taken_weights_do_not_need_their_file(tmp_path: Path) -> None:
    """Catches tensors that stay mapped, and change with the file."""
    file = tmp_path / "model.safetensors"
    tensors = {"d2t": torch.arange(6), "head": torch.ones(2, 3)}
    save_file(tensors, file)
    weights = read_head_weights(file)
    taken = weights.take_integers("d2t", (6,)), weights.take("head", (2, 3), torch.float32)
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert all(map(torch.equal, taken, tensors.values()))


def test_what_heads_cannot_read_is_refused(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "eagle", "eagle", random_head("eagle"))
    with pytest.raises(ConfigError, match="reads tokens alone"):
        start("eagle", folder, enable_prompt_embeds=True)
    with pytest.raises(ConfigError, match="leave enable_lora out"):
        start("eagle", folder, enable_lora=True)
    (folder / "pytorch_model.bin").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read as tensors"):
        start("eagle", folder)
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ConfigError, match="cannot be read as tensors"):
        start("eagle", folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has none of medusa_lm_head"):
        start("eagle", folder)
