"""Let a model call functions of this program, with the official OpenAI client.

    quire serve &
    python examples/tool_loop.py "What is 123 times 45?"

The loop sends the question and the tools, runs the calls of the answer, sends their results, and
goes on until the answer is text. The bundled model calls one simple tool well; other small models
seldom call one by themselves, and `--force` asks for a call in the first answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from openai import OpenAI

MAX_ROUNDS = 4


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


FUNCTIONS: dict[str, Callable[..., Any]] = {"multiply": multiply}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"a": NUMBER, "b": NUMBER},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
]


def converse(client: OpenAI, question: str, *, force: bool = False) -> Iterator[str]:
    """Yield one line for each call, and the last answer."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    choice: Any = "required" if force else "auto"
    for _ in range(MAX_ROUNDS):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=128,
        )
        message = answer.choices[0].message
        messages.append(message)
        if answer.choices[0].finish_reason != "tool_calls":
            yield message.content or ""
            return
        for call in message.tool_calls or ():
            assert call.type == "function"
            arguments = json.loads(call.function.arguments)  # it fits the schema
            result = FUNCTIONS[call.function.name](**arguments)
            yield f"{call.function.name}({call.function.arguments}) = {result}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        choice = "auto"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Let a model call functions.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--force", action="store_true", help="ask for a call at first")
    options = parser.parse_args(arguments)
    with OpenAI(base_url=options.url, api_key="none") as client:
        for line in converse(client, options.question, force=options.force):
            sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
