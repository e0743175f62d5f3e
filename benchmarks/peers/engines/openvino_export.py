"""Convert the random checkpoint for OpenVINO: arguments MODEL FOLDER FORMAT SEED.

FP16 and BF16 keep 16 bits. INT8 has one scale per output channel, INT4 one per 128 weights, or per
64 where 128 do not divide the inputs. Both are symmetric and of every layer, but the tied embedding
has 8 bits under INT4 as well, with a scale and a zero point per output channel.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.engines.random_checkpoint import write_checkpoint

INT4_GROUP = 128


def main() -> None:
    model, folder, weights, seed = sys.argv[1:]
    dtype = "float16" if weights == "FP16" else "bfloat16"
    parent = Path(folder).parent
    checkpoint = write_checkpoint(Path(model), parent / f"checkpoint_{dtype}", dtype, int(seed))
    convert(checkpoint, Path(folder), weights)


def convert(checkpoint: Path, folder: Path, weights: str) -> None:
    """Leave nothing under the folder's name unless all of it is there."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    config = None
    if weights == "INT8":
        config = OVWeightQuantizationConfig(bits=8, sym=True)
    elif weights == "INT4":
        config = OVWeightQuantizationConfig(
            bits=4, sym=True, group_size=INT4_GROUP, ratio=1.0, group_size_fallback="adjust"
        )
    converted = OVModelForCausalLM.from_pretrained(
        str(checkpoint),
        export=True,
        compile=False,
        load_in_8bit=False if config is None else None,
        quantization_config=config,
    )
    staged = folder.with_name(f"{folder.name}.tmp")
    converted.save_pretrained(staged)
    staged.rename(folder)


if __name__ == "__main__":
    main()
