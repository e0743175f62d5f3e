"""`rank_invariant`: one, two, four and eight processes give the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from tests.engine.test_laws import has_kernels, workload
from tests.models.families import Case, write_checkpoint
from tests.profiles import SCALE

pytestmark = pytest.mark.skipif(not has_kernels(), reason="torch sums rows by their number")

SIZES = {
    "hidden_size": 128,
    "head_dim": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("invariant")
    write_checkpoint(Case("dense", "llama", SIZES), path)
    return str(path)


def answers(folder: str, ranks: int, **settings: Any) -> list[Any]:
    """Tokens and log-probabilities of each request."""
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=6, ignore_eos=True, logprobs=3)
        for i in range(8)
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in workload()]
    made: dict[str, Any] = {
        "tensor_parallel_size": ranks,
        "num_kv_blocks": 256,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
        "skip_tokenizer_init": True,
        "quiet": True,
        **settings,
    }
    with LLM(folder, **made) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (
            list(output.outputs[0].token_ids),
            [
                {token: each.logprob for token, each in step.items()}
                for step in output.outputs[0].logprobs or ()
            ],
        )
        for output in outputs
    ]


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [("float32", (4,)), ("bfloat16", (2, 8))]
    if SCALE == 1
    else [("float32", (2, 4, 8)), ("bfloat16", (2, 4, 8))],
)
def test_any_number_of_ranks_gives_the_same_bits(
    folder: str, dtype: str, sizes: tuple[int, ...]
) -> None:
    """Log-probabilities tell each bit of logits that matters. Turns red when ranks add partial sums
    in an order of their own: `test_without_it_bits_differ` shows that there is one."""
    wanted = answers(folder, 1, dtype=dtype, rank_invariant=True)
    for ranks in sizes:
        assert answers(folder, ranks, dtype=dtype, rank_invariant=True) == wanted


def test_without_it_bits_differ(folder: str) -> None:
    assert answers(folder, 1, dtype="float32") != answers(folder, 2, dtype="float32")


def test_prompts_in_pieces_are_captured(folder: str) -> None:
    """Turns red when sums of pieces are added by torch."""
    with LLM(folder, rank_invariant=True, quiet=True, skip_tokenizer_init=True) as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
        llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        client: Any = llm.engine.client
        runner = client._core._executor._worker._assembly.runner
        assert set(runner._decode.drawing.recorded) == {1}
        assert runner._forward._model.graphs is not None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "int8"}, "quantized rows"),
        ({"enable_lora": True}, "adapters"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide 8"),
    ],
)
def test_what_cannot_be_invariant_is_refused(
    folder: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"rank_invariant=True: {words}"):
        LLM(folder, rank_invariant=True, skip_tokenizer_init=True, quiet=True, **settings)
