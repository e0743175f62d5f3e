"""The bundled model, run by the engine, ends scripted dialogues with the right answer or call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

SCRIPTED = Path(__file__).with_name("scripted_dialogues.json")
TOOL_CALL_TOKEN = "<|tool_call|>"
END_TOKEN = "<|end|>"


def is_right(expected: dict[str, Any], text: str) -> bool:
    """text: the answer with its special tokens, without the one that ends it."""
    if "tool_calls" not in expected:
        return text == expected["content"]
    function = expected["tool_calls"][0]["function"]
    if not text.startswith(TOOL_CALL_TOKEN):
        return False
    try:
        given = json.loads(text.removeprefix(TOOL_CALL_TOKEN))
    except json.JSONDecodeError:
        return False
    arguments = json.loads(function["arguments"])
    return given == {"name": function["name"], "arguments": arguments}


def test_95_of_100_dialogues_end_right() -> None:
    """A fault in the template, the tokenizer, the model or the cache shows as nonsense here."""
    entries = json.loads(SCRIPTED.read_text())
    params = SamplingParams(temperature=0, max_tokens=96, skip_special_tokens=False)
    with LLM(quiet=True, num_kv_blocks=2048) as llm:
        right = 0
        for tools in {json.dumps(entry["tools"]) for entry in entries}:
            group = [entry for entry in entries if json.dumps(entry["tools"]) == tools]
            outputs = llm.chat(
                [entry["messages"] for entry in group],
                params,
                tools=json.loads(tools) or None,
                use_tqdm=False,
            )
            for entry, output in zip(group, outputs, strict=True):
                text = output.outputs[0].text.removesuffix(END_TOKEN)
                right += is_right(entry["expected"], text)
    assert len(entries) == 100
    assert right >= 95
