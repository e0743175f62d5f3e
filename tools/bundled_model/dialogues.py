"""Generated dialogues for the chat format of the bundled model, and the scripted ones that test it.

Training dialogues never contain a question or tool wish whose key is held out; scripted dialogues
consist of nothing else (questions without arguments, such as a greeting, belong to both).
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field
from typing import Any

import dialogue_data as data
from dialogue_skills import Question, Skill, draw_drill, draw_skill
from dialogue_tools import Json, ToolTask, draw_task

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
TOOLS, TOOL, TOOL_CALL, END = "<|tools|>", "<|tool|>", "<|tool_call|>", "<|end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, TOOLS, TOOL, TOOL_CALL, END)

HELD_OUT_ONE_IN = 12
SCRIPTED_SEED = 2026
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant. Answer briefly.",
    "Answer briefly.",
    "You are a small demonstration model.", "Be polite and short.",
    "Use the tools if you need them.",
)  # fmt: skip
NO_TOOL = "I have no tool for that."


@dataclass
class Dialogue:
    """Messages in the shape of the chat API, the tools, and what the last turn is about."""

    category: str
    messages: list[Json] = field(default_factory=list)
    tools: list[Json] = field(default_factory=list)


def is_held_out(key: str) -> bool:
    """True for the share of keys that training never sees; an empty key is never held out."""
    return bool(key) and hashlib.sha256(key.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def make_drill(rng: random.Random) -> Dialogue:
    """A training dialogue of hard questions only."""
    dialogue = Dialogue("drill")
    for _ in range(rng.randint(1, 6)):
        _question_turn(dialogue, _draw_question(rng, False, draw_drill))
    return dialogue


def _draw_question(rng: random.Random, held_out: bool, draw: Skill = draw_skill) -> Question:
    while True:
        question = draw(rng)
        if not question.key or is_held_out(question.key) == held_out:
            return question


def _draw_tool_task(rng: random.Random, held_out: bool) -> ToolTask:
    while True:
        task = draw_task(rng)
        if is_held_out(task.key) == held_out:
            return task


def make_dialogue(rng: random.Random, held_out: bool, with_tools: bool) -> Dialogue:
    """One dialogue of one to four turns."""
    dialogue = Dialogue("small talk")
    if rng.random() < 0.35:
        dialogue.messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    if with_tools:
        _tool_turns(rng, dialogue, held_out)
    elif rng.random() < 0.12:
        _name_turns(rng, dialogue, held_out)
    else:
        for _ in range(rng.choice((1, 1, 2, 2, 3))):
            if rng.random() < 0.06:
                _question_turn(dialogue, _unfulfilled(rng, set(), held_out))
            else:
                _question_turn(dialogue, _draw_question(rng, held_out))
    return dialogue


def _question_turn(dialogue: Dialogue, question: Question) -> None:
    dialogue.messages.append({"role": "user", "content": question.user})
    dialogue.messages.append({"role": "assistant", "content": question.answer})
    dialogue.category = question.category


def _name_turns(rng: random.Random, dialogue: Dialogue, held_out: bool) -> None:
    """The user gives a name and asks for it later: the answer lies further back."""
    name = data.person(rng)
    while is_held_out(f"name/{name}") != held_out:
        name = data.person(rng)
    greeting = rng.choice(
        ("My name is {n}.", "I am {n}.", "Hello, I am {n}.", "Hi, my name is {n}.")
    )
    question = rng.choice(
        ("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?")
    )
    opening = Question("memory", "", greeting.format(n=name), f"Nice to meet you, {name}.")
    _question_turn(dialogue, opening)
    for _ in range(rng.choice((0, 1, 1, 2))):
        _question_turn(dialogue, _draw_question(rng, held_out))
    _question_turn(dialogue, Question("memory", "", question, f"Your name is {name}."))


def _declare(rng: random.Random, tasks: list[ToolTask], others: int) -> list[ToolTask]:
    """The tasks among some whose tools are not needed; one of each kind and name, in any order."""
    declared = list(tasks)
    for _ in range(others):
        other = draw_task(rng)
        if all(other.kind != task.kind and other.name != task.name for task in declared):
            declared.append(other)
    rng.shuffle(declared)
    return declared


def _tool_turns(rng: random.Random, dialogue: Dialogue, held_out: bool) -> None:
    tasks: list[ToolTask] = []
    for _ in range(rng.choice((1, 1, 2))):
        task = _draw_tool_task(rng, held_out)
        if all(task.kind != other.kind and task.name != other.name for other in tasks):
            tasks.append(task)
    declared = _declare(rng, tasks, rng.choice((0, 0, 1, 1, 2)))
    dialogue.tools = [task.tool for task in declared]
    turns: list[ToolTask | Question] = list(tasks)
    extra = rng.random()
    if extra < 0.25:
        question = _draw_question(rng, held_out)
        if question.category != "arithmetic":
            turns.insert(rng.randrange(len(turns) + 1), question)
    elif extra < 0.35:
        refusal = _unfulfilled(rng, {task.kind for task in declared}, held_out)
        turns.insert(rng.randrange(len(turns) + 1), refusal)
    for turn in turns:
        if isinstance(turn, Question):
            _question_turn(dialogue, turn)
            dialogue.category = "tools not needed"
        else:
            _call_turn(dialogue, turn)
            if turn is not turns[-1] or rng.random() < 0.5:
                _result_turn(dialogue, turn)


def _unfulfilled(rng: random.Random, kinds: set[str], held_out: bool) -> Question:
    """A wish that needs a tool which is not declared."""
    while True:
        task = _draw_tool_task(rng, held_out)
        # Sums are answered without a tool, and a built tool may resemble one that is declared.
        if task.kind not in kinds and task.kind != "arithmetic" and " " not in task.kind:
            return Question("no tool", task.key, task.user, NO_TOOL)


def _call_turn(dialogue: Dialogue, task: ToolTask) -> None:
    dialogue.messages.append({"role": "user", "content": task.user})
    function = {"name": task.name, "arguments": json.dumps(task.arguments, ensure_ascii=False)}
    call_id = f"call_{len(dialogue.messages)}"
    call = {"id": call_id, "type": "function", "function": function}
    dialogue.messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    dialogue.category = "tool call"


def _result_turn(dialogue: Dialogue, task: ToolTask) -> None:
    call_id = dialogue.messages[-1]["tool_calls"][0]["id"]
    dialogue.messages.append({"role": "tool", "tool_call_id": call_id, "content": task.result})
    dialogue.messages.append({"role": "assistant", "content": task.answer})
    dialogue.category = "tool result"


def render_tools(tools: list[Json]) -> str:
    """Declarations as the chat template writes them: one line each."""
    lines: list[str] = []
    for tool in tools:
        function = tool["function"]
        schema: dict[str, Any] = function.get("parameters") or {}
        required = schema.get("required") or []
        names = ", ".join(
            f"{name}{'' if name in required else '?'}: {value.get('type', 'any')}"
            for name, value in (schema.get("properties") or {}).items()
        )
        description = function.get("description") or ""
        lines.append(f"{function['name']}({names}) {description}".rstrip())
    return "\n".join(lines)


def render(dialogue: Dialogue) -> list[tuple[str, bool]]:
    """Pieces of text in order, each with whether the model is to write it itself."""
    pieces: list[tuple[str, bool]] = [(BOS, False)]
    if dialogue.tools:
        pieces.append((f"{TOOLS}{render_tools(dialogue.tools)}{END}", False))
    for message in dialogue.messages:
        role = message["role"]
        if role != "assistant":
            marker = {"system": SYSTEM, "user": USER, "tool": TOOL}[role]
            pieces.append((f"{marker}{message['content']}{END}", False))
            continue
        pieces += [(ASSISTANT, False), (assistant_text(message) + END, True)]
    return pieces


def assistant_text(message: Json) -> str:
    """Return what the model writes for an assistant message, without the end marker."""
    text = message.get("content") or ""
    for call in message.get("tool_calls") or []:
        function = call["function"]
        text += f'{TOOL_CALL}{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
    return text


def scripted_dialogues(seed: int = SCRIPTED_SEED, count: int = 100) -> list[Json]:
    """Held-out dialogues, half of them with tools, each ending where the model has to answer.

    An entry has `id`, `category`, `tools`, `messages` (the history that is sent) and `expected`
    (the assistant message that has to come: `content`, or `tool_calls`).
    """
    rng = random.Random(f"scripted {seed}")
    scripted: list[Json] = []
    while len(scripted) < count:
        dialogue = make_dialogue(rng, held_out=True, with_tools=len(scripted) % 2 == 0)
        entry = {
            "id": len(scripted),
            "category": dialogue.category,
            "tools": dialogue.tools,
            "messages": dialogue.messages[:-1],
            "expected": dialogue.messages[-1],
        }
        scripted.append(entry)
    return scripted


def main() -> None:
    rng = random.Random(0)
    for index in range(8):
        dialogue = make_dialogue(rng, held_out=False, with_tools=index % 2 == 0)
        print("".join(text for text, _ in render(dialogue)), "\n")


if __name__ == "__main__":
    main()
