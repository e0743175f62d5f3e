"""Engines on tiny checkpoints for text and images, and `transformers` on the same ones."""

from __future__ import annotations

import asyncio
import functools
import re
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from quire import LLM, AsyncLLM, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "quiet": True,
    "num_kv_blocks": 256,
    "block_size": 16,
    "max_model_len": 512,
}


TYPE_NAMES = {"qwen": "mm_token_type_ids", "gemma": "token_type_ids"}
"""Name of the argument that tells tokens of images from text."""


def asked(text: str, *images: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def worker_of(llm: LLM) -> Any:
    client: Any = llm.engine.client
    return client._core._executor._worker


def tokens(output: Any) -> list[int]:
    assert output.error is None, output.error
    return list(output.outputs[0].token_ids)


async def last_tokens(engine: AsyncLLM, prompt: Any) -> list[int]:
    """Tokens of a stream at its end."""
    found: list[int] = []
    async for output in engine.generate(prompt, GREEDY):
        found = list(output.outputs[0].token_ids)
    return found


def streamed(folder: Path, prompts: list[Any]) -> list[list[int]]:
    """Tokens of streams side by side; nothing is left of their images."""

    async def work() -> list[list[int]]:
        with AsyncLLM(str(folder), **SETTINGS) as engine:
            found = await asyncio.gather(*(last_tokens(engine, each) for each in prompts))
            await last_tokens(engine, "text")
            client: Any = engine.engine.client
            assert not client._core._executor._worker._media._rows
            return list(found)

    return asyncio.run(work())


@functools.cache
def oracle(folder: Path) -> tuple[Any, Any]:
    """Model and image processor of transformers."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    processors = {"qwen": Qwen2VLImageProcessorPil, "gemma": Gemma3ImageProcessorPil}
    processor = processors.get(_lineage(model), Idefics3ImageProcessorPil)
    return model.eval(), processor.from_pretrained(folder)


def _lineage(model: Any) -> str:
    return re.split(r"\d|_", model.config.model_type)[0]


def inputs_of(folder: Path, prompt_ids: list[int], images: list[Image.Image]) -> dict[str, Any]:
    """Arguments of the model for a prompt with so many image tokens."""
    model, processor = oracle(folder)
    ids = torch.tensor([prompt_ids])
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if images:
        given |= dict(processor([images], return_tensors="pt"))
    if images and (name := TYPE_NAMES.get(_lineage(model))) is not None:
        given[name] = (ids == model.config.image_token_id).int()
    given.pop("num_crops", None)
    return given


def greedy(folder: Path, output: Any, images: list[Image.Image]) -> list[int]:
    """Return the best token after each beginning of an engine's whole answer, by one
    forward. They are the answer if and only if `generate` gives it."""
    model, _ = oracle(folder)
    prompt, answer = list(output.prompt_token_ids), tokens(output)
    assert len(answer) == GREEDY.max_tokens
    inputs = inputs_of(folder, [*prompt, *answer[:-1]], images)
    with torch.inference_mode():
        logits = model(**inputs, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist()


def generated(
    folder: Path, prompt_ids: list[int], images: list[Image.Image], count: int = 12
) -> list[int]:
    """Tokens of `generate`; models with recurrent states compute all anew for each."""
    model, _ = oracle(folder)
    found = model.generate(
        **inputs_of(folder, prompt_ids, images),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        use_cache=not model.config.model_type.startswith("qwen3_5"),
    )
    return found[0, len(prompt_ids) :].tolist()
