"""Answers that a test dictates: the engine in memory draws its tokens, seed by seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.bundled import bundled_model_path
from quire.config.families.reader import read_model_spec
from quire.config.settings import EngineSettings
from quire.engine.model_front import ModelFront, load_model_front
from tests.server.running import RunningServer

__all__ = ["Script", "as_joined", "hermes_front", "joined", "without_ids"]

END = "<|end|>"
_RENAMED = {
    "<|tools|>": "<think>",
    "<|tool|>": "</think>",
    "<|tool_call|>": "<tool_call>",
    "<|system|>": "</tool_call>",
}
_TEMPLATE = """
{%- if tools %}{{ '<|user|>Tools:' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '<|end|>' }}{% endif %}
{%- if verbosity is defined %}{{ '<|user|>Verbosity: ' + verbosity + '<|end|>' }}{% endif %}
{%- for message in messages %}
{{- '<|' + ('assistant' if message.role == 'assistant' else 'user') + '|>' }}
{%- if message.role == 'tool' %}{{ 'result: ' }}{% endif %}
{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}
{%- endif %}
{%- endif %}
"""


def hermes_front(folder: Path) -> ModelFront:
    """The bundled tokenizer with the markers of a model of Qwen3's form, which thinks. They are
    added tokens, but no special ones."""
    bundled = bundled_model_path()
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((bundled / name).read_bytes())
    text = (bundled / "tokenizer.json").read_text()
    for old, new in _RENAMED.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    tokenizer: dict[str, Any] = json.loads(text)
    for token in tokenizer["added_tokens"]:
        token["special"] &= token["content"] not in _RENAMED.values()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config: dict[str, Any] = json.loads((bundled / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace("\n{{-", "{{-").strip())
    return load_model_front(EngineSettings(), folder, read_model_spec(folder))


class Script:
    """Texts that the engine of a server draws, by the seeds of requests. A token that the request's
    grammar forbids ends the request with an error."""

    def __init__(self, server: RunningServer, front: ModelFront) -> None:
        assert front.renderer.tokenizer is not None
        self._tokenizer = front.renderer.tokenizer
        self._told: dict[int, list[int]] = {}
        self._left: dict[tuple[int, int], list[int]] = {}
        self._model = server.client.engine.model
        self._draw = self._model.draw
        self._next_seed = 10_000

    def __enter__(self) -> Script:
        self._model.draw = self._drawn  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._model.draw

    def tell(self, text: str) -> int:
        """The seed of the one request of which each sample gets `text`."""
        self._next_seed += 1
        self._told[self._next_seed] = self.ids(text)
        return self._next_seed

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _drawn(self, hidden: int, seed: int, sample_index: int, mask: Any = None) -> int:
        tokens = self._left.setdefault((seed, sample_index), list(self._told.get(seed, ())))
        if not tokens:
            return self._draw(hidden, seed, sample_index, mask)
        token = tokens.pop(0)
        if mask is not None and token not in self._model.allowed(mask):
            text = self._tokenizer.token_string(token)
            raise ValueError(f"the grammar forbids {text!r} here")
        return token


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice that a client puts together, which checks the form of each chunk."""
    content: str | None = None
    calls: list[dict[str, Any]] = []
    reasoning, reason, has_begun = "", None, False
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            delta = choice["delta"]
            assert reason is None, "something follows the end"
            assert ("role" in delta) is not has_begun
            has_begun = True
            if delta.get("content") is not None:
                content = (content or "") + delta["content"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            reasoning += delta.get("reasoning", "")
            for call in delta.get("tool_calls", ()):
                _add_call(calls, call)
            reason = choice["finish_reason"]
            assert reason is None or delta in ({}, {"content": ""}), "the end comes by itself"
    assert len({call["id"] for call in calls}) == len(calls)
    message: dict[str, Any] = {"content": content, "calls": calls, "reasoning": reasoning}
    return {**message, "finish_reason": reason}


def _add_call(calls: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """A call begins with id, type and name, once; then come pieces of its arguments."""
    function = call["function"]
    if "id" in call:
        assert call["index"] == len(calls)
        assert call["type"] == "function" and function["arguments"] == ""
        calls.append({"id": call["id"], "name": function["name"], "arguments": ""})
        return
    assert call["index"] == len(calls) - 1
    assert set(call) == {"index", "function"} and set(function) == {"arguments"}
    assert function["arguments"]
    calls[-1]["arguments"] += function["arguments"]


def as_joined(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = [
        {"id": call["id"], "name": call["function"]["name"], **call["function"]}
        for call in message.get("tool_calls", [])
    ]
    assert message.get("reasoning") == message.get("reasoning_content")
    return {
        "content": message["content"],
        "calls": calls,
        "reasoning": message.get("reasoning", ""),
        "finish_reason": choice["finish_reason"],
    }


def without_ids(found: dict[str, Any]) -> dict[str, Any]:
    calls = [{k: v for k, v in call.items() if k != "id"} for call in found["calls"]]
    return {**found, "calls": calls}
