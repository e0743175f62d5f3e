"""The scripts that made the bundled model agree with the files they wrote."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quire.bundled import bundled_model_path

SCRIPTED = Path(__file__).with_name("scripted_dialogues.json")
Script = Callable[[str], ModuleType]

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
def hf_tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(bundled_model_path())


def test_scripted_dialogues_are_those_of_the_generator(script: Script) -> None:
    """Catches an edited script whose file was not written anew."""
    generated = script("dialogues").scripted_dialogues()
    assert generated == json.loads(SCRIPTED.read_text(encoding="utf-8"))


def test_training_never_draws_a_held_out_key(script: Script) -> None:
    """Catches scripted arguments that leak into training."""
    dialogues = script("dialogues")
    rng = random.Random(7)
    for _ in range(300):
        question = dialogues._draw_question(rng, held_out=False)
        task = dialogues._draw_tool_task(rng, held_out=False)
        assert not dialogues.is_held_out(question.key)
        assert not dialogues.is_held_out(task.key)


def test_chat_template_writes_what_training_saw(script: Script, hf_tokenizer: Any) -> None:
    """Catches a template that differs from the training format by as much as a blank."""
    dialogues = script("dialogues")
    rng = random.Random(3)
    for index in range(100):
        dialogue = dialogues.make_dialogue(rng, held_out=False, with_tools=index % 2 == 0)
        seen = "".join(text for text, _ in dialogues.render(dialogue))
        written = hf_tokenizer.apply_chat_template(
            dialogue.messages, tools=dialogue.tools or None, tokenize=False
        )
        assert written == seen


def test_chat_template_accepts_what_clients_send(hf_tokenizer: Any) -> None:
    """Catches a template that fails on text parts, on arguments as objects, or on null content."""
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "?"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    written = hf_tokenizer.apply_chat_template(
        messages, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    assert written == (
        "<|bos|><|tools|>get_weather(city: string, unit?: string) Get the weather.<|end|>"
        "<|system|>Be brief.<|end|><|user|>Weather?<|end|><|assistant|><|tool_call|>"
        '{"name": "get_weather", "arguments": {"city": "Oslo"}}<|end|><|assistant|>'
    )


def test_kneser_ney_probabilities_sum_to_one(script: Script) -> None:
    """Catches a baseline that loses probability, which would make the model look better."""
    numpy = pytest.importorskip("numpy")
    text = numpy.array([0, 1, 2, 1, 0, 1, 2, 2, 1, 0, 0, 1])
    model = script("ngram").KneserNey([text], 3, vocabulary=3, boundary=3)
    for context in ([], [0], [0, 1], [2, 0, 0], [1, 2, 0]):
        before = model.bits(numpy.array(context, dtype=int)) if context else 0.0
        bits = [model.bits(numpy.array([*context, symbol])) - before for symbol in range(3)]
        assert sum(2**-value for value in bits) == pytest.approx(1.0)


def test_training_model_and_transformers_give_equal_logits(script: Script) -> None:
    """Catches a wrong name, a transposed matrix, or a rotation of the other kind in the export."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    own = script("evaluate").load_bundled(bundled_model_path())
    other = transformers.LlamaForCausalLM.from_pretrained(bundled_model_path(), dtype=torch.float32)
    ids = torch.randint(10, 4096, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(own(ids), other(ids).logits, atol=1e-3, rtol=1e-3)
