"""A tool agent of LangChain over `quire serve`.

    pip install langchain langchain-openai
    quire serve &
    python examples/agents/langchain_agent.py "What is 6 times 7?" --force

Small models seldom call a tool by themselves: `--force` asks for a call in the first answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import OpenAI


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


@wrap_model_call
def call_first(
    request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]
) -> ModelResponse:
    """Ask for a call until there is a result."""
    has_result = any(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request if has_result else request.override(tool_choice="required"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Let an agent of LangChain call a function.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--force", action="store_true", help="ask for a call at first")
    options = parser.parse_args(arguments)
    with OpenAI(base_url=options.url, api_key="none") as client:
        name = client.models.list().data[0].id
    model = ChatOpenAI(
        model=name, base_url=options.url, api_key="none", temperature=0, max_tokens=128
    )
    agent = create_agent(model, tools=[multiply], middleware=[call_first] if options.force else [])
    given = {"messages": [{"role": "user", "content": options.question}]}
    for message in agent.invoke(given, {"recursion_limit": 12})["messages"]:
        for call in getattr(message, "tool_calls", ()):
            sys.stdout.write(f"call: {call['name']}({call['args']})\n")
        sys.stdout.write(f"{message.type}: {message.content}\n")


if __name__ == "__main__":
    main()
