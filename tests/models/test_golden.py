"""Every supported family equals `transformers` in logits, however the tokens are fed.

Catches: a wrong formula, a missing bias or norm, weights in the wrong place, positions or windows
off by one, and anything in the paged cache that depends on how a prompt was cut into steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.families import CASES, Case, random_sequences, write_checkpoint
from tests.models.harness import BLOCK_SIZE, PagedModel
from tests.pairs import LAWS_BY_PAIRS
from transformers import DynamicCache

pytestmark = LAWS_BY_PAIRS

TOLERANCE = 1e-4
"""Relative to the largest logit; float32 sums in another order differ by about 1e-6."""

Logits = dict[int, torch.Tensor]


@dataclass(frozen=True)
class Golden:
    """A checkpoint, what to feed, and the logits of every token by `transformers`."""

    case: Case
    folder: Path
    sequences: dict[int, list[int]]
    logits: Logits


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.name)
    model = write_checkpoint(case, folder)
    sequences = random_sequences(case.lengths)
    with torch.inference_mode():
        logits = {seq: model(torch.tensor([tokens])).logits[0] for seq, tokens in sequences.items()}
    return Golden(case, folder, sequences, logits)


@pytest.fixture(params=["reference", "best"])
def paged(request: pytest.FixtureRequest, golden: Golden) -> PagedModel:
    return PagedModel(golden.folder, request.param, golden.case.max_positions)


def test_whole_prefill(golden: Golden, paged: PagedModel) -> None:
    """All sequences at once, each in one chunk."""
    assert_equal(paged.step(golden.sequences), golden.logits)


def test_token_by_token(golden: Golden, paged: PagedModel) -> None:
    """Half of each sequence as a prompt, then one token of every sequence per step."""
    steps = [{seq: tokens[: len(tokens) // 2] for seq, tokens in golden.sequences.items()}]
    for offset in range(max(golden.case.lengths)):
        step = {}
        for seq, tokens in golden.sequences.items():
            position = len(tokens) // 2 + offset
            step[seq] = tokens[position : position + 1]
        steps.append(step)
    assert_equal(run(paged, steps), golden.logits)


def test_chunked_prefill(golden: Golden, paged: PagedModel) -> None:
    """Chunks of uneven sizes, sequences at different stages in one batch."""
    steps = chunks(golden.sequences, [5, 1, 8, 3, 1, 11])
    assert_equal(run(paged, steps), golden.logits)


def test_prefix_hit(golden: Golden, paged: PagedModel) -> None:
    """A sequence that begins with two blocks of another one, beside which it goes on."""
    if paged.spec.states:
        pytest.skip("a prefix of recurrent layers starts from a checkpoint, which the engine keeps")
    seq = max(golden.sequences, key=lambda seq: len(golden.sequences[seq]))
    tokens, wanted, known = golden.sequences[seq], golden.logits[seq], 2 * BLOCK_SIZE
    first = paged.step({0: tokens[:known]})[0]
    paged.share(0, 1, 2)
    later = paged.step({0: tokens[known:], 1: tokens[known:]})
    assert_equal({0: torch.cat([first, later[0]])}, {0: wanted})
    assert_equal({1: later[1]}, {1: wanted[known:]})


class SeenRows:
    """Stands before a layer and notes how many rows each call has."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.counts: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.counts.append(len(x))
        return self._layer(x)


def test_hidden_states_of_wanted_tokens(golden: Golden, paged: PagedModel) -> None:
    """Turns red when a forward that is asked for some tokens' hidden states computes others behind
    its last attention."""
    token_ids, positions, step = paged.inputs(golden.sequences)
    wanted = torch.tensor([len(token_ids) - 1, 0, 3])
    layers: Any = paged.model
    seen = [SeenRows(block.output) for block in layers.blocks]
    for block, output in zip(layers.blocks, seen, strict=True):
        block.output = output
    with torch.inference_mode():
        everything = paged.model.forward(token_ids, positions, step)
        some = paged.model.forward(token_ids, positions, replace(step, wanted_tokens=wanted))
    torch.testing.assert_close(some, everything[wanted])
    if paged.backend_name != "reference":
        assert torch.equal(some, everything[wanted])
    whole = len(token_ids)
    assert [each.counts for each in seen] == [[whole, whole]] * (len(seen) - 1) + [[whole, 3]]


def chunks(sequences: dict[int, list[int]], sizes: list[int]) -> Iterator[dict[int, list[int]]]:
    """Sequence s starts s steps late and takes sizes[(step + s) % len(sizes)] tokens per step."""
    done = dict.fromkeys(sequences, 0)
    step = 0
    while any(done[seq] < len(tokens) for seq, tokens in sequences.items()):
        batch = {}
        for seq, tokens in sequences.items():
            if step >= seq:
                size = sizes[(step + seq) % len(sizes)]
                batch[seq] = tokens[done[seq] : done[seq] + size]
                done[seq] += len(batch[seq])
        step += 1
        yield batch


def run(paged: PagedModel, steps: Iterator[dict[int, list[int]]] | list) -> Logits:
    pieces: dict[int, list[torch.Tensor]] = {}
    for step in steps:
        batch = {seq: tokens for seq, tokens in step.items() if tokens}
        if batch:
            for seq, logits in paged.step(batch).items():
                pieces.setdefault(seq, []).append(logits)
    return {seq: torch.cat(parts) for seq, parts in pieces.items()}


def assert_equal(got: Logits, expected: Logits) -> None:
    assert got.keys() == expected.keys()
    for seq, reference in expected.items():
        assert got[seq].shape == reference.shape
        error = (got[seq] - reference).abs().max() / reference.abs().max()
        assert error <= TOLERANCE, f"sequence {seq}: relative error {error:.2e}"


def test_dynamic_rope_beyond_the_trained_length(tmp_path: Path) -> None:
    """Catches a base that does not grow as in `transformers`, which takes each position's base
    from the length at which that position is decoded."""
    case = next(case for case in CASES if case.name == "llama-dynamic")
    model = write_checkpoint(case, tmp_path)
    tokens = random_sequences((90,))[0]
    takes = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in takes else "past_key_values"  # before transformers 5.24
    cache, expected = {name: DynamicCache(config=model.config)}, []
    with torch.inference_mode():
        for token in tokens:
            out = model(torch.tensor([[token]]), use_cache=True, **cache)
            expected.append(out.logits[0, 0])
    paged = PagedModel(tmp_path, "reference", 128)
    steps = chunks({0: tokens}, [40, 1, 30, 19])
    assert_equal(run(paged, steps), {0: torch.stack(expected)})


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "gemma2", "opt", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", ["reference", "best"])
def test_half_precision(tmp_path: Path, name: str, dtype: torch.dtype, implementation: str) -> None:
    """Catches a cast that is missing or in the wrong place: errors stay near those of
    `transformers` in the same dtype, both against float32."""
    case = next(case for case in CASES if case.name == name)
    tokens = random_sequences()[0]
    model = write_checkpoint(case, tmp_path, dtype)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].float()
        exact = model.float()(torch.tensor([tokens])).logits[0]
    paged = PagedModel(tmp_path, implementation, 64)
    got = run(paged, chunks({0: tokens}, [11, 1, 5]))[0]
    assert (got - exact).norm() <= 1.5 * (theirs - exact).norm()
