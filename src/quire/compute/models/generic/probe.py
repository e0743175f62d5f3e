"""Finds out what `transformers` would ask of attention, without loading a weight.

    python -m quire.compute.models.generic.probe FOLDER

The model is built and run over a few tokens on the meta device, where tensors have shapes alone.
Prints a JSON object: the facts of `config/families/generic.py`, or {"refused": reason}.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quire.compute.models.generic.interface import NAME, AttentionCall, connect, register

__all__ = ["RefusedError", "facts_of", "main"]

TOKENS = 8
LAYER_TYPES = {"full_attention", "sliding_attention"}
MOVING_ROPES = {"dynamic", "longrope", "su"}
"""Ropes whose angles follow the longest sequence of a batch."""


class RefusedError(Exception):
    """`transformers` computes the model otherwise than through one causal attention per layer."""


def main() -> int:
    """Print the facts of the folder that the command line names."""
    try:
        found = facts_of(Path(sys.argv[1]))
    except RefusedError as error:
        found = {"refused": str(error)}
    except Exception as error:  # noqa: BLE001  whatever the model's code raises is why it cannot run
        found = {"refused": f"transformers cannot build it: {type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def facts_of(folder: Path) -> dict[str, Any]:
    """Facts of a checkpoint folder. Raises RefusedError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    text = config.get_text_config(decoder=True)
    _refuse_by_config(text)
    more = {}
    if hasattr(text, "_experts_implementation"):
        more["experts_implementation"] = "batched_mm"  # the usual one asks which experts are hit
    with torch.device("meta"), torch.inference_mode():
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=NAME, dtype=torch.bfloat16, trust_remote_code=False, **more
        ).eval()
        own = type(model).__name__
        if own not in (config.architectures or ()):
            raise RefusedError(f"it has {own} for model_type={config.model_type!r}")
        calls = _run(model)
    layers = [_layer(call) for call in calls]
    if [call.layer for call in calls] != list(range(text.num_hidden_layers)):
        raise RefusedError(
            f"{len(calls)} calls of attention for {text.num_hidden_layers} layers: some layers "
            "are not attention, or compute it themselves"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise RefusedError("it counts positions by itself")
    return {
        "model_type": text.model_type,
        "vocab_size": model.get_output_embeddings().weight.shape[0],
        "hidden_size": text.hidden_size,
        "max_positions": getattr(text, "max_position_embeddings", None),
        "layers": layers,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "matrices": _matrices(model),
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
    }


def _refuse_by_config(text: Any) -> None:
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - LAYER_TYPES:
        raise RefusedError(f"layers of the kind {', '.join(sorted(kinds - LAYER_TYPES))}")
    if getattr(text, "use_bidirectional_attention", False) or not getattr(text, "is_causal", True):
        raise RefusedError("attention in both directions")
    ropes: Any = getattr(text, "rope_parameters", None) or {}
    nested = [each for each in ropes.values() if isinstance(each, dict)]
    for rope in (ropes, *nested):
        if rope.get("rope_type") in MOVING_ROPES:
            raise RefusedError(f"rope of the type {rope['rope_type']}")


def _run(model: Any) -> list[AttentionCall]:
    calls: list[AttentionCall] = []

    def handler(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        heads, tokens = call.q.shape[1:3]
        return call.q.new_empty((1, tokens, heads, call.v.shape[-1]))

    connect(model, handler)
    ids = torch.zeros((1, TOKENS), dtype=torch.long)
    model(input_ids=ids, position_ids=torch.arange(TOKENS)[None], use_cache=False)
    return calls


def _layer(call: AttentionCall) -> dict[str, Any]:
    if not call.is_causal:
        raise RefusedError(f"attention of layer {call.layer} in both directions")
    if call.is_masked:
        raise RefusedError(f"layer {call.layer} makes a mask of its own")
    if call.k.shape[-1] != call.v.shape[-1] or call.k.shape[-1] != call.q.shape[-1]:
        raise RefusedError(f"keys and values of layer {call.layer} differ in width")
    if call.q.shape[2] != TOKENS or call.k.shape[2] != TOKENS:
        raise RefusedError(f"layer {call.layer} attends to other than its own tokens")
    return {
        "heads": call.q.shape[1],
        "kv_heads": call.k.shape[1],
        "head_dim": call.q.shape[-1],
        "window": call.window,
        "soft_cap": call.soft_cap is not None,
        "sinks": call.sinks is not None,
    }


def _matrices(model: Any) -> list[tuple[int, int, int, bool]]:
    """Outputs, inputs and number of the linear layers, and whether they give logits."""
    head = model.get_output_embeddings()
    counts = Counter(
        (module.out_features, module.in_features, module is head)
        for module in model.modules()
        if isinstance(module, nn.Linear)
    )
    return [(outs, ins, count, is_head) for (outs, ins, is_head), count in counts.items()]


if __name__ == "__main__":
    sys.exit(main())
