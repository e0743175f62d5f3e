"""M-RoPE: tokens with three positions equal Qwen2-VL's text model in `transformers`, on every path
of the runner."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLRotaryEmbedding,
    Qwen2VLTextModel,
    apply_rotary_pos_emb,
)

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.compute.layers import RotaryEmbedding
from quire.compute.runner.rows import RowTable
from quire.config.rope import RopeSpec
from quire.ops.kv.rope_and_write_kv.rope import rope
from quire.protocol.media import Media
from quire.protocol.request import EngineRequest
from quire.protocol.step import EnterRow, MediaSpan, StepPlan
from tests.runner.late_device import keep_rows_on_device
from tests.small_engines import SMALL

SECTIONS = (1, 2, 1)
CONFIG: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": SECTIONS},
}


@pytest.fixture(scope="module")
def theirs() -> Qwen2VLTextModel:
    torch.manual_seed(0)
    model = Qwen2VLTextModel(Qwen2VLTextConfig(**CONFIG)).eval()
    for weight in model.parameters():  # large enough for attention to tell positions apart
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    for layer in model.layers:  # large ones, as Qwen2 has, which an int8 cache would do without
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=2.0)
    return model


@pytest.fixture(scope="module")
def folder(theirs: Qwen2VLTextModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text model as a checkpoint of Qwen2, which it is but for its positions."""
    path = tmp_path_factory.mktemp("mrope")
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **CONFIG}
    (path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    weights = {f"model.{name}": t.clone() for name, t in theirs.state_dict().items()}
    save_file(weights, path / "model.safetensors")
    return path


def image(rows: int, columns: int) -> np.ndarray:
    """Positions [3, rows · columns] of a picture of so many patches."""
    places = np.indices((1, rows, columns)).reshape(3, -1)
    return places.astype(np.int32)


class Prompt:
    """Text, pictures and text: embeddings [N, E], positions [3, N], and what a request says."""

    def __init__(self, seed: int, table: torch.Tensor, pictures: Sequence[tuple[int, int]]) -> None:
        rng = np.random.default_rng(seed)
        tokens, rows = list[int](), list[torch.Tensor]()
        positions, self.spans = list[np.ndarray](), list[tuple[int, np.ndarray, torch.Tensor]]()
        following = 0

        def text(count: int) -> None:
            nonlocal following
            ids = rng.integers(3, 120, count)
            tokens.extend(ids.tolist())
            rows.append(table[torch.from_numpy(ids)])
            positions.append(np.tile(following + np.arange(count), (3, 1)))
            following += count

        text(int(rng.integers(1, 6)))
        for size in pictures:
            own = image(*size)
            given = torch.from_numpy(rng.normal(size=(own.shape[1], 32)).astype(np.float32))
            self.spans.append((len(tokens), own, given))
            tokens.extend([128] * own.shape[1])
            rows.append(given)
            positions.append(own + following)
            following += int(own.max()) + 1
            text(int(rng.integers(1, 5)))
        self.tokens, self.embeds = tokens, torch.cat(rows)
        self.positions = np.concatenate(positions, axis=1)


Scored = list[tuple[int, float]]
"""Tokens and their log-probabilities."""


def expected(theirs: Qwen2VLTextModel, prompt: Prompt, count: int) -> Scored:
    """The most likely tokens after a prompt, computed as a whole each time."""
    table = theirs.embed_tokens.weight
    embeds, positions, found = prompt.embeds, torch.from_numpy(prompt.positions), []
    with torch.inference_mode():
        for _ in range(count):
            hidden = theirs(
                inputs_embeds=embeds[None], position_ids=positions[:, None], use_cache=False
            ).last_hidden_state[0, -1]
            best = (table @ hidden).log_softmax(0).topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "another seed has no such tie"
            found.append((int(best.indices[0]), float(best.values[0])))
            embeds = torch.cat((embeds, table[best.indices[:1]]))
            positions = torch.cat((positions, positions[:, -1:].max() + torch.ones(3, 1)), 1).long()
    return found


def run(llm: LLM, prompts: Sequence[Prompt], count: int) -> list[Scored]:
    client: Any = llm.engine.client
    tokens: dict[int, Scored] = {}
    for number, prompt in enumerate(prompts):
        media = list[Media]()
        for at, (start, positions, given) in enumerate(prompt.spans):
            handle = 1000 + 10 * number + at
            info = client.put_media(handle, given)
            span = MediaSpan(start, info.num_tokens, handle, positions.reshape(-1))
            media.append(Media(info.digest, span))
        ids = np.array(prompt.tokens, np.int32)
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)
        client.add(EngineRequest(str(number), number, ids, sampling, 0, media=tuple(media)))
        tokens[number] = []
    while client.has_unfinished:
        output = client.step()
        assert not [f for f in output.finished if f.message], output.finished
        for handle, token in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
            (entry,) = output.logprobs[handle]
            tokens[handle].append((token, entry.logprob))
    return list(tokens.values())


@pytest.fixture
def prompts(theirs: Qwen2VLTextModel) -> list[Prompt]:
    table = theirs.embed_tokens.weight.detach()
    return [
        Prompt(1, table, [(2, 3)]),
        Prompt(2, table, []),
        Prompt(3, table, [(3, 2), (1, 4)]),
        Prompt(4, table, [(4, 4)]),
    ]


@pytest.fixture(params=["host", "device"])
def engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LLM]]:
    if request.param == "device":
        keep_rows_on_device(monkeypatch)
    started = list[LLM]()
    yield started
    for engine in started:
        engine.shutdown()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"num_kv_blocks": 22, "max_num_batched_tokens": 8},
        {"depth": 3, "enforce_eager": True},
        {"kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_the_engine_equals_transformers(
    theirs: Qwen2VLTextModel,
    folder: Path,
    prompts: list[Prompt],
    engines: list[LLM],
    settings: dict[str, Any],
) -> None:
    """Batched, chunked, preempted, cached and as computed for the first time."""
    defaults = {**SMALL, "enable_prompt_embeds": True, "max_num_seqs": 4}
    engines.append(LLM(str(folder), **{**defaults, **settings}))
    wanted = [expected(theirs, prompt, 12) for prompt in prompts]
    for _ in range(2):
        found = run(engines[0], prompts, 12)
        for ours, others in zip(found, wanted, strict=True):
            if settings.get("kv_cache_dtype") == "int8":  # rounds, so that later tokens may differ
                ours, others = ours[:1], others[:1]
            tolerance = 0.1 if settings.get("kv_cache_dtype") == "int8" else 1e-3
            assert [token for token, _ in ours] == [token for token, _ in others]
            scores, theirs_scores = ([score for _, score in each] for each in (ours, others))
            assert scores == pytest.approx(theirs_scores, abs=tolerance)


def test_the_layer_equals_transformers() -> None:
    config = Qwen2VLTextConfig(**CONFIG)
    rng = np.random.default_rng(0)
    positions = torch.from_numpy(rng.integers(0, 60, (3, 11)))
    q, k = (torch.from_numpy(rng.normal(size=(11, n, 8)).astype(np.float32)) for n in (4, 2))
    cos, sin = Qwen2VLRotaryEmbedding(config)(q, positions[:, None])
    their_q, their_k = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    rotary = RotaryEmbedding(RopeSpec(8, 100.0, None, (0, 1, 1, 2)), 64, torch.device("cpu"))
    assert all(each.is_contiguous() for each in rotary.at(positions)), "kernels read whole rows"
    our_q, our_k = q.clone(), k.clone()
    rope(our_q, our_k, *rotary.at(positions))
    torch.testing.assert_close(our_q, their_q[0])
    torch.testing.assert_close(our_k, their_k[0])
    flat, one = positions[:1].expand(3, -1), positions[0]
    rope(on_three := q.clone(), k.clone(), *rotary.at(flat))
    rope(on_one := q.clone(), k.clone(), *rotary.at(one))
    assert torch.equal(on_three, on_one)


def test_a_row_knows_its_positions_in_any_chunk() -> None:
    table = torch.zeros(128, 32)
    prompt = Prompt(5, table, [(2, 3), (1, 1), (3, 3)])
    length = len(prompt.tokens)
    spans = tuple(
        MediaSpan(start, own.shape[1], 0, own.reshape(-1)) for start, own, _ in prompt.spans
    )
    rows = RowTable(2, 64, [4], position_axes=3)
    enter = EnterRow(
        0, np.zeros(length, np.int32), length, 0, (np.zeros(16, np.int32),), SamplingParams(), 0, 0,
        media=spans,
    )  # fmt: skip
    rows.apply(StepPlan(0, enter=(enter,)))
    assert rows.position_offset[0] == prompt.positions[0, -1] - (length - 1)
    for start in range(length):
        for end in range(start + 1, length + 1):
            rows.num_computed[0], rows.standing[0] = start, end - start
            found = rows.positions_on_axes(rows.scheduled())
            if start < spans[-1].end:
                assert found is not None
                assert np.array_equal(found, prompt.positions[:, start:end])
            else:
                assert found is None
    rows.fork(0, 1)
    assert rows.position_offset[1] == rows.position_offset[0]
    assert rows.media[1] == rows.media[0]


@pytest.mark.parametrize("sections", [[1, 2], [1, 1, 1], [2, 3, -1], [1, 2, 1, 0]])
def test_sections_that_do_not_fit_the_head_are_refused(
    folder: Path, tmp_path: Path, sections: list[int]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["mrope_section"] = sections
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="mrope_section"):
        LLM(str(tmp_path), quiet=True, load_format="dummy", skip_tokenizer_init=True)
