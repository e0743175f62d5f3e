"""Write a trained model as a Hugging Face model folder (bf16).

Run from the repository root, for a checkpoint of a run that goes on:
    python tools/bundled_model/export.py --checkpoint FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from dialogues import BOS, END, EOS, PAD, SPECIAL_TOKENS
from model import ModelConfig, TinyLlama
from safetensors.torch import save_file
from tokenizer import BUNDLED


def hf_config(config: ModelConfig) -> dict[str, object]:
    """config.json of a LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def generation_config() -> dict[str, object]:
    """Stop at the end of a turn or of a text; mild sampling where a client names none."""
    return {
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": [SPECIAL_TOKENS.index(END), SPECIAL_TOKENS.index(EOS)],
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "do_sample": True,
        "temperature": 0.3,
        "top_p": 0.95,
    }


def export_weights(model: TinyLlama, folder: Path) -> None:
    """Write model.safetensors and the two configurations into `folder`."""
    tensors = {
        f"model.{name}": weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
    }
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors leaves it readable by its owner alone
    partial.replace(folder / "model.safetensors")
    for name, values in (
        ("config.json", hf_config(model.config)),
        ("generation_config.json", generation_config()),
    ):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def load_checkpoint(folder: Path) -> tuple[TinyLlama, int]:
    """The model of a training checkpoint and its step."""
    state = torch.load(folder / "state.pt", weights_only=True)
    model = TinyLlama(ModelConfig(**state["config"]))
    model.load_state_dict(state["model"])
    return model, state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=BUNDLED)
    options = parser.parse_args()
    model, step = load_checkpoint(options.checkpoint)
    options.output.mkdir(parents=True, exist_ok=True)
    export_weights(model, options.output)
    print(f"step {step} written to {options.output}")


if __name__ == "__main__":
    main()
