"""Logits of a checkpoint by OpenVINO, in a process of its own.

    python -m benchmarks.peers.engines.openvino_logits < request.json

{"checkpoint": folder, "converted": folder to make, "weights": format of openvino_export, "exact":
whether activations stay as they are, "windows": lists of token ids, "threads": n, "output": folder}
writes float32 logits [tokens, vocabulary] of each window to OUTPUT/0.npy and so on. Run by an
interpreter that has optimum-intel.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from benchmarks.peers.engines.openvino_export import convert

__all__: list[str] = []


def main() -> None:
    request = json.load(sys.stdin)
    converted = Path(request["converted"])
    if not converted.exists():
        convert(Path(request["checkpoint"]), converted, request["weights"])
    import openvino
    import torch
    from optimum.intel import OVModelForCausalLM

    properties = {"INFERENCE_NUM_THREADS": str(request["threads"])}
    if request["exact"]:
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
    model = OVModelForCausalLM.from_pretrained(str(converted), ov_config=properties)
    for number, window in enumerate(request["windows"]):
        ids = torch.tensor([window])
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        np.save(Path(request["output"]) / f"{number}.npy", found.float().numpy())
    print(json.dumps({"version": openvino.get_version(), "properties": properties}))


if __name__ == "__main__":
    main()
