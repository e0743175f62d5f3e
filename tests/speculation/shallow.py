"""A draft model of the bundled model: its first layers, which guess what it says now and then."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

import quire.bundled

__all__ = ["BUNDLED", "write_shallow"]

BUNDLED = Path(quire.bundled.__file__).parent


def write_shallow(folder: Path, num_layers: int, vocab_size: int | None = None) -> Path:
    """Write the first `num_layers` layers of the bundled model, for other tokens if `vocab_size`
    is given. The folder."""
    config = json.loads((BUNDLED / "config.json").read_text())
    config |= {"num_hidden_layers": num_layers}
    tensors = load_file(BUNDLED / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if (found := re.search(r"layers\.(\d+)\.", name)) is None or int(found[1]) < num_layers
    }
    if vocab_size is not None:
        config |= {"vocab_size": vocab_size}
        name = "model.embed_tokens.weight"
        kept[name] = kept[name][:vocab_size].clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(BUNDLED / "tokenizer.json", folder)
    return folder
