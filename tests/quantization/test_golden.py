"""A quantized model equals `transformers` with the dequantized weights in its layers.

The layers multiply in 8-bit activations. `transformers` is made to round its activations alike;
what is left then are float32 sums in another order, and now and then an activation that lies so
close to the middle of two integers that it is rounded to the other one. A second comparison leaves
its activations as they are, and shows what 8 bits of them cost.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.compute.quantization import QuantizedFormats
from quire.config import MatrixShape
from quire.config.quantization import choose_format, rotation_of, shared_rotation
from quire.ops.linear.rotate.reference import rotate
from tests.models.families import CASES, random_sequences, write_checkpoint
from tests.models.harness import PagedModel, new_ops
from tests.pairs import BY_PAIRS

TOLERANCE = 1e-5
"""Largest norm of the difference, divided by the norm of the logits; float32 sums differ by about
2e-7."""

FLIP_ERROR = 1e-2
"""The same, for a sequence in which an activation was rounded to the other of two integers. That
moves it by 1/127 of the largest of its token, and is seen in about one sequence of twenty."""

ACTIVATION_ERROR = 0.05
"""The same, from rounding activations in every layer: each
is off by up to 1/254 of the largest of its token; these tiny models of 32 channels average little
of it out."""

NAMES = ("llama-bias", "llama-tied", "qwen3-bias", "mistral-window", "opt-350m", "gpt2-scales")
BY_NAME = {case.name: case for case in CASES}


def dequantize_weights(model: Any, quantization: str, *, tied: bool) -> None:
    """Replace every matrix of a `transformers` model by what the engine makes of it."""
    formats = QuantizedFormats(quantization, new_ops("reference"))
    for name, module in projections(model).items():
        if tied and name == "lm_head":
            continue  # is the embedding, which comes next
        unit = shared_unit(name, model.config)
        replace_weight(module, formats, is_head=name == "lm_head", unit=unit)
    if tied:
        replace_weight(model.get_input_embeddings(), formats, is_head=True, unit=None)


def replace_weight(
    module: Any, formats: QuantizedFormats, *, is_head: bool, unit: int | None
) -> None:
    """unit: see `shared_unit`."""
    weight = module.weight.data.t() if is_transposed(module) else module.weight.data
    chosen = formats.choose(MatrixShape(*weight.shape, is_head=is_head))
    chosen = chosen if unit is None else chosen.shared(weight.shape[1], unit)
    rows = chosen.pack(weight.contiguous(), None).rows(torch.arange(len(weight)))
    module.weight.data.copy_(rows.t() if is_transposed(module) else rows)


def projections(model: Any) -> dict[str, Any]:
    kinds = ("Linear", "Conv1D")
    return {n: m for n, m in model.named_modules() if type(m).__name__ in kinds}


def is_transposed(module: Any) -> bool:
    return type(module).__name__ == "Conv1D"


def shared_unit(name: str, config: Any) -> int | None:
    """Inputs that no two ranks share; None for a projection whose inputs ranks do not share."""
    if name.endswith(("down_proj", "fc2", "mlp.c_proj")):
        return 1
    is_output = name.endswith(("o_proj", "out_proj", "attn.c_proj"))
    heads = config.hidden_size // config.num_attention_heads
    return (getattr(config, "head_dim", None) or heads) if is_output else None


def rounding_of(
    name: str, module: Any, config: Any, quantization: str
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A token's activations, rotated, to the nearest of 255 multiples of max|x| / 127, and rotated
    back."""
    inputs, unit = module.weight.shape[not is_transposed(module)], shared_unit(name, config)
    shape = MatrixShape(1, inputs, is_head=name == "lm_head")
    chosen = choose_format(quantization, shape).name
    block = rotation_of(chosen, inputs)
    block = block if unit is None else shared_rotation(chosen, inputs, unit)

    def round_activations(module: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        del module
        x = rotate(given[0], block)
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (rotate((x / scale).round() * scale, block) / block,)

    return round_activations


@BY_PAIRS
@pytest.mark.parametrize("implementation", ["reference", "best"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, quantization: str, implementation: str, tmp_path: Path) -> None:
    """Catches scales of the wrong rows, parts of a merged layer that are mixed up, a bias that is
    scaled, and a matrix that is not quantized or not in the format that was chosen."""
    case = BY_NAME[name]
    model = write_checkpoint(case, tmp_path)
    sequences = random_sequences(case.lengths)
    got = PagedModel(tmp_path, implementation, case.max_positions, quantization).step(sequences)
    dequantize_weights(model, quantization, tied=bool(model.config.tie_word_embeddings))
    with torch.inference_mode():
        exact = {seq: model(torch.tensor([ids])).logits[0] for seq, ids in sequences.items()}
        for part, module in projections(model).items():
            module.register_forward_pre_hook(rounding_of(part, module, model.config, quantization))
        alike = {seq: model(torch.tensor([ids])).logits[0] for seq, ids in sequences.items()}
    errors = [relative_error(got[seq], alike[seq]) for seq in sequences]
    assert max(errors) <= FLIP_ERROR
    assert sum(error <= TOLERANCE for error in errors) >= len(errors) / 2, errors
    assert max(relative_error(got[seq], exact[seq]) for seq in sequences) <= ACTIVATION_ERROR


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
