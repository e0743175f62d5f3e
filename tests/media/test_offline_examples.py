"""Programs for images as they are written for vLLM: engine arguments, prompts and their forms."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.image_oracle import generated
from tests.image_writer import MARKS, TILE, picture, write_any_checkpoint

from quire import LLM, EngineArgs, SamplingParams

PROCESSOR_VALUES: dict[str, dict[str, Any]] = {
    "gemma3": {"do_pan_and_scan": True},
    "idefics3": {"size": {"longest_edge": 3 * TILE}},
    "smolvlm": {"max_image_size": {"longest_edge": TILE}},
    "qwen2_5_vl": {"min_pixels": 16 * 16, "max_pixels": 40 * 8 * 8, "fps": 1},
    "qwen3_vl": {"min_pixels": 16 * 16, "max_pixels": 40 * 8 * 8, "fps": 1},
}
"""Arguments that the examples have for these models, in sizes of tiny checkpoints."""


@pytest.mark.parametrize("kind", PROCESSOR_VALUES)
def test_one_image_and_several(kind: str, tmp_path: Path) -> None:
    """The image here is too small for crops in Gemma 3."""
    folder, images = write_any_checkpoint(tmp_path / kind, kind), [picture(90, 84), picture(50, 60)]
    args = EngineArgs(
        model=str(folder),
        max_model_len=512,
        max_num_seqs=2,
        mm_processor_kwargs=PROCESSOR_VALUES[kind],
        limit_mm_per_prompt={"image": 1},
    )
    args.limit_mm_per_prompt = {"image": 2, "video": 0, "audio": 0}
    more = {"seed": 0, "mm_processor_cache_gb": 4}
    small = {"dtype": "float32", "num_kv_blocks": 128, "quiet": True}
    llm = LLM(**(asdict(args) | more | small))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=None)
    mark = MARKS[kind]
    one: dict[str, Any] = {
        "prompt": f"{mark} What is in this image?",
        "multi_modal_data": {"image": images[0]},
        "multi_modal_uuids": {"image": ["uuid_0"]},
    }
    two = {"prompt": f"{mark}{mark} Compare.", "multi_modal_data": {"image": images}}
    with llm:
        outputs = llm.generate([one, two], sampling_params=params, lora_request=None)
    for output, given in zip(outputs, (images[:1], images), strict=True):
        wanted = generated(folder, list(output.prompt_token_ids), given, 8)
        assert list(output.outputs[0].token_ids) == wanted
