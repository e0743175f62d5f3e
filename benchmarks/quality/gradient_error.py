"""Errors of `quire.training` on the bundled model, in its forward and in its gradient.

    python -m benchmarks.quality.gradient_error [--output FILE] [--sequences N] [--tokens N]

The oracle is Llama's formulas in float64, at the weights that the engine computes with, through
torch's autograd. Forward: |difference| of log-probabilities in nats, of the engine and of the
reference, from the oracle and from each other. The gradient is that of the mean log-probability:
|difference| / |oracle| in the 2-norm, over all parameters and for the worst tensor. The text is
quire's documentation (workloads/documentation.txt). Nothing is drawn and nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from benchmarks.arguments import command_line, positive_number

from quire import LLM
from quire.config import ModelSpec
from quire.entrypoints.bench.record import Spread, new_record, spread_of
from quire.training import PolicyModel

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "benchmarks" / "workloads" / "documentation.txt"
DTYPES = ("float32", "bfloat16")

Weights = Mapping[str, torch.Tensor]


def exact_log_probs(weights: Weights, spec: ModelSpec, tokens: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities of all tokens but the first, in the dtype of the weights, by the
    formulas of Touvron et al. 2023 and Su et al. 2021. spec: a Llama without rope scaling."""
    ids = torch.tensor(tokens)
    x = weights["model.embed_tokens.weight"][ids]
    later = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for layer, rope in enumerate(spec.ropes):
        assert rope is not None and rope.scaling is None and rope.rotary_dim == spec.head_dim
        own = _below(weights, f"model.layers.{layer}.")
        h = _norm(x, own["input_layernorm.weight"], spec.norm_eps)
        q, k, v = (
            (h @ own[f"self_attn.{part}_proj.weight"].t()).unflatten(-1, (-1, spec.head_dim))
            for part in "qkv"
        )
        group = spec.num_heads // spec.num_kv_heads
        q, k = _rotated(q, rope.theta), _rotated(k, rope.theta).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / spec.head_dim**0.5
        shares = scores.masked_fill(later, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", shares, v.repeat_interleave(group, 1)).flatten(1)
        x = x + attended @ own["self_attn.o_proj.weight"].t()
        h = _norm(x, own["post_attention_layernorm.weight"], spec.norm_eps)
        gate, up = (h @ own[f"mlp.{part}_proj.weight"].t() for part in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].t()
    x = _norm(x, weights["model.norm.weight"], spec.norm_eps)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return (x[:-1] @ head.t()).log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def _below(weights: Weights, prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)
    }


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [T, heads, D]; element i is paired with i + D/2."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] * theta ** -(torch.arange(half) / half).to(x)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def errors(llm: LLM, sequences: Sequence[Sequence[int]]) -> dict[str, float]:
    """Errors of a policy over an engine, by name."""
    policy = PolicyModel(llm)
    dtype: torch.dtype = getattr(torch, llm.engine.resolved.settings.dtype)
    exact_weights = {
        name: each.detach().to(dtype).double().requires_grad_()
        for name, each in policy.named_parameters()
    }
    engine = torch.cat(policy(sequences))
    reference = torch.cat(policy.reference(sequences))
    exact = torch.cat([exact_log_probs(exact_weights, llm.engine.spec, row) for row in sequences])
    engine.mean().backward()
    exact.mean().backward()
    values = {"engine": engine.detach().double(), "reference": reference.double(),
              "oracle": exact.detach()}  # fmt: skip
    found: dict[str, float] = {}
    for left, right in (("engine", "oracle"), ("reference", "oracle"), ("engine", "reference")):
        gap = (values[left] - values[right]).abs()
        found[f"{left}_from_{right}_mean_nats"] = float(gap.mean())
        found[f"{left}_from_{right}_max_nats"] = float(gap.max())
    gaps, norms = list[torch.Tensor](), list[torch.Tensor]()
    for name, parameter in policy.named_parameters():
        wanted = exact_weights[name].grad
        assert parameter.grad is not None and wanted is not None
        gaps.append((parameter.grad.double() - wanted).norm())
        norms.append(wanted.norm())
    ratios = torch.stack(gaps) / torch.stack(norms)
    found["gradient_error"] = float(torch.stack(gaps).norm() / torch.stack(norms).norm())
    found["gradient_error_of_worst_tensor"] = float(ratios.max())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks/results/gradient_error.json"
    )
    parser.add_argument("--sequences", type=positive_number, default=8)
    parser.add_argument("--tokens", type=positive_number, default=128)
    options = parser.parse_args()
    figures: dict[str, Spread] = {}
    resolved = None
    for dtype in DTYPES:
        with LLM(dtype=dtype, max_model_len=options.tokens + 1, quiet=True) as llm:
            resolved = llm.engine.resolved
            tokenizer = llm.get_tokenizer()
            assert tokenizer is not None
            ids = tokenizer.encode(TEXT.read_text("utf-8"), add_special_tokens=False)
            sequences = [
                ids[first : first + options.tokens]
                for first in range(0, options.sequences * options.tokens, options.tokens)
            ]
            for name, value in errors(llm, sequences).items():
                print(f"{dtype} {name} {value:.3g}", flush=True)
                figures[f"{dtype}_{name}"] = spread_of([value])
    new_record(
        "gradient_error",
        command_line(),
        resolved,
        None,
        seed=0,
        workload={"text": TEXT, "sequences": options.sequences, "tokens": options.tokens},
        figures=figures,
    ).save(options.output)


if __name__ == "__main__":
    main()
