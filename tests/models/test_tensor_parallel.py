"""Ranks of a model, made from one checkpoint, give together what the whole model gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.models.families import CASES, Case, random_sequences, write_checkpoint
from tests.models.harness import PagedModel, new_factory, new_ops
from tests.models.ranks import on_ranks
from tests.models.test_golden import Logits, assert_equal, chunks, run

from quire.base.errors import ConfigError, EngineError
from quire.compute.models import load_model, loader
from quire.compute.quantization import QuantizedFormats
from quire.config import read_model_spec
from quire.config.shard import ONE_RANK, Shard
from quire.ops.distributed import ALONE, Collectives

UNEVEN = {
    *(("mpt-6-heads", 4), ("bloom-6-heads", 4)),
    *(("granite-4", 4), ("granite-4-moe", 4), ("mamba2", 4)),
}
"""Six heads are not for four ranks, nor are two groups of heads with states."""

ODD_VOCABULARY = {"vocab_size": 129}
MORE_CASES = (
    Case("llama-odd-vocabulary", "llama", ODD_VOCABULARY),
    Case("qwen2-odd-vocabulary-tied", "qwen2", {**ODD_VOCABULARY, "tie_word_embeddings": True}),
)
SHARED_CASES = tuple(case for case in (*CASES, *MORE_CASES) if "rope_parameters" not in case.extra)
"""Ranks share no positions."""

CHUNKS = [5, 1, 8, 3, 1, 11]


def named(name: str) -> Case:
    return next(case for case in (*CASES, *MORE_CASES) if case.name == name)


def logits_of(paged: PagedModel, case: Case) -> Logits:
    return run(paged, chunks(random_sequences(case.lengths), CHUNKS))


def logits_of_ranks(folder: Path, case: Case, size: int, **options: Any) -> list[Logits]:
    def work(shard: Shard, collectives: Collectives) -> Logits:
        paged = PagedModel(
            folder, max_positions=case.max_positions, shard=shard, collectives=collectives,
            **options,
        )  # fmt: skip
        return logits_of(paged, case)

    return on_ranks(size, work)


def to_the_bit(got: Logits, expected: Logits) -> bool:
    return all(torch.equal(got[seq], expected[seq]) for seq in expected)


@pytest.mark.parametrize("case", SHARED_CASES, ids=lambda case: case.name)
def test_ranks_equal_the_whole_model(case: Case, tmp_path: Path) -> None:
    """Turns red when a projection is cut the wrong way, a bias is added by each rank, a fused
    tensor is cut across q, k and v, a head meets the wrong kv head, or a slope the wrong head."""
    write_checkpoint(case, tmp_path)
    whole = logits_of(PagedModel(tmp_path, "reference", case.max_positions), case)
    for size, implementation in ((2, "best"), (4, "reference")):
        if (case.name, size) in UNEVEN:
            continue
        ranks = logits_of_ranks(tmp_path, case, size, implementation=implementation)
        assert_equal(ranks[0], whole)
        assert all(to_the_bit(other, ranks[0]) for other in ranks[1:])


def assert_near(got: Logits, expected: Logits) -> None:
    """Up to where rounded sums in another order become other integers."""
    for seq, logits in expected.items():
        assert (got[seq] - logits).norm() <= 0.02 * logits.norm()


@pytest.mark.parametrize("implementation", ["reference", "best"])
@pytest.mark.parametrize("name", ["llama", "qwen2-odd-vocabulary-tied", "gpt2", "mpt"])
def test_int8_ranks_equal_the_whole_model(name: str, implementation: str, tmp_path: Path) -> None:
    """Turns red when quantized parts are put together wrongly; tests/layers/test_shards.py has
    their bits."""
    case = named(name)
    write_checkpoint(case, tmp_path)
    options = {"implementation": implementation, "quantization": "int8"}
    whole = logits_of(PagedModel(tmp_path, max_positions=case.max_positions, **options), case)
    for size in (2, 4):
        assert_near(logits_of_ranks(tmp_path, case, size, **options)[0], whole)


INT4_CASE = Case(
    "llama-int4", "llama", {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
)


def test_int4_ranks_equal_the_whole_model(tmp_path: Path) -> None:
    """Turns red when a rank's group gets another scale, zero point or power of two."""
    write_checkpoint(INT4_CASE, tmp_path)
    options = {"implementation": "reference", "quantization": "int4"}
    whole = logits_of(PagedModel(tmp_path, **options), INT4_CASE)
    for size in (2, 4):
        assert_near(logits_of_ranks(tmp_path, INT4_CASE, size, **options)[0], whole)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_ranks_with_activations_of_16_bits(quantization: str, tmp_path: Path) -> None:
    """Sums are those of floats, in another order. Turns red when ranks complete them as sums of
    integers, or rotate inputs in other blocks than the whole model."""
    write_checkpoint(INT4_CASE, tmp_path)
    ops = new_ops("best").with_activation_bits(16)
    options = {"implementation": "best", "formats": QuantizedFormats(quantization, ops)}
    whole = logits_of(PagedModel(tmp_path, **options), INT4_CASE)
    assert_equal(logits_of_ranks(tmp_path, INT4_CASE, 2, **options)[0], whole)


def test_int4_groups_are_not_cut(tmp_path: Path) -> None:
    case = Case("llama-int4", "llama", {"hidden_size": 64, "intermediate_size": 64})
    write_checkpoint(case, tmp_path)
    with pytest.raises(ConfigError, match="a group of 32 that shares a scale; use fewer ranks"):
        logits_of_ranks(tmp_path, case, 4, implementation="reference", quantization="int4")


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_ranks_with_an_int8_cache(name: str, tmp_path: Path) -> None:
    """Turns red when the biases that an int8 cache does without are those of other heads."""
    case = named(name)
    write_checkpoint(case, tmp_path)
    options = {"implementation": "best", "kv_dtype": "int8"}
    whole = logits_of(PagedModel(tmp_path, max_positions=case.max_positions, **options), case)
    for size in (2, 4):
        assert_near(logits_of_ranks(tmp_path, case, size, **options)[0], whole)


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}, "6 query heads"),
        ({"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6}, "6 kv heads"),
        ({"intermediate_size": 50}, "50 gate outputs"),
        ({"vocab_size": 5}, "5 tokens of the vocabulary"),
    ],
)
def test_uneven_shares_are_refused(extra: dict[str, Any], what: str, tmp_path: Path) -> None:
    case = Case("uneven", "llama", extra)
    write_checkpoint(case, tmp_path)
    with pytest.raises(ConfigError, match=f"^{what} cannot be shared by 4 ranks; use a number of"):
        logits_of_ranks(tmp_path, case, 4, implementation="reference")


class CountingFile:
    """An opened safetensors file that notes how many numbers are read of it."""

    def __init__(self, file: Any, counts: dict[str, int]) -> None:
        self._file, self._counts = file, counts

    def __enter__(self) -> CountingFile:
        self._opened = self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._count(name, self._opened.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        return CountingSlice(self, name, self._opened.get_slice(name))

    def _count(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._counts[name] = self._counts.get(name, 0) + tensor.numel()
        return tensor


class CountingSlice:
    def __init__(self, file: CountingFile, name: str, tensor: Any) -> None:
        self._file, self._name, self._tensor = file, name, tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._file._count(self._name, self._tensor[index])


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "mpt"])
def test_a_rank_reads_its_part_of_the_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a rank reads whole tensors that it then cuts."""
    case, counts = named(name), dict[str, int]()
    write_checkpoint(case, tmp_path)
    monkeypatch.setattr(
        loader,
        "safe_open",
        lambda *args, **kwargs: CountingFile(safe_open(*args, **kwargs), counts),
    )
    logits_of_ranks(tmp_path, case, 2, implementation="reference")
    tensors = load_file(tmp_path / "model.safetensors")
    for key, count in counts.items():
        is_cut = tensors[key].dim() == 2 and "position" not in key and "wpe" not in key
        if is_cut:
            assert count == tensors[key].numel(), f"{key}: not once for both ranks"


def test_a_number_that_is_not_finite_is_told_by_its_place_on_disk(tmp_path: Path) -> None:
    """Turns red when the place is one within a rank's part."""
    case = named("gpt2")
    write_checkpoint(case, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith("h.1.attn.c_attn.weight"))
    tensors[key][3, 90] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"holds nan at \[3, 90\]"):
        logits_of_ranks(tmp_path, case, 2, implementation="reference")


def test_dummy_weights_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """Turns red when each rank draws weights of its own."""
    write_checkpoint(named("llama"), tmp_path)
    spec = read_model_spec(tmp_path)
    x = torch.randn(3, spec.intermediate_size)

    def outputs(shard: Shard, collectives: Collectives) -> torch.Tensor:
        factory = new_factory(spec, shard=shard, collectives=collectives)
        model: Any = load_model(spec, tmp_path, factory, "dummy", progress=False)
        return model.blocks[1].mlp.down(x.chunk(shard.size, dim=1)[shard.rank])

    first, second = on_ranks(2, outputs)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, outputs(ONE_RANK, ALONE))


def test_replaced_weights_are_cut_too(tmp_path: Path) -> None:
    """Turns red when `update_weights` gives a rank the whole tensor, or another part."""
    case = named("gpt2")
    write_checkpoint(case, tmp_path)
    spec = read_model_spec(tmp_path)
    name = "transformer.h.1.attn.c_attn.weight"
    weight = torch.randn(32, 96)
    x = torch.randn(3, 32)

    def outputs(shard: Shard, collectives: Collectives) -> torch.Tensor:
        factory = new_factory(spec, shard=shard, collectives=collectives)
        new = {name: weight}
        model: Any = load_model(spec, tmp_path, factory, progress=False, replaced=new)
        return model.blocks[1].qkv(x)

    whole = outputs(ONE_RANK, ALONE).view(3, 3, 2, -1)
    for rank, got in enumerate(on_ranks(2, outputs)):
        torch.testing.assert_close(got.view(3, 3, -1), whole[:, :, rank])


def test_a_rank_needs_its_collectives(tmp_path: Path) -> None:
    """Turns red when a rank computes alone what is only a part."""
    write_checkpoint(named("llama"), tmp_path)
    with pytest.raises(EngineError, match="a rank of 2 was given collectives of 1"):
        PagedModel(tmp_path, "reference", shard=Shard(0, 2))
