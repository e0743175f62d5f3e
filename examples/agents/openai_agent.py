"""An agent of the OpenAI Agents SDK over `quire serve`.

    pip install openai-agents
    quire serve &
    python examples/agents/openai_agent.py "What is 6 times 7?" --force

Small models seldom call a tool by themselves: `--force` asks for a call in the first answer.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    ToolCallItem,
    ToolCallOutputItem,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


async def ask(url: str, question: str, *, force: bool) -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        name = (await client.models.list()).data[0].id
        settings = ModelSettings(
            temperature=0, max_tokens=128, tool_choice="required" if force else None
        )  # the SDK asks for no more calls after the first
        agent = Agent(
            "calculator",
            instructions="Use the tools.",
            model=OpenAIChatCompletionsModel(name, client),
            model_settings=settings,
            tools=[multiply],
        )
        result = await Runner.run(agent, question, max_turns=6)
    for item in result.new_items:
        if isinstance(item, ToolCallItem):
            call = item.raw_item
            sys.stdout.write(f"{call.name}({call.arguments})\n")
        elif isinstance(item, ToolCallOutputItem):
            sys.stdout.write(f"= {item.output}\n")
    sys.stdout.write(f"{result.final_output}\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Let an agent call a function.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--force", action="store_true", help="ask for a call at first")
    options = parser.parse_args(arguments)
    asyncio.run(ask(options.url, options.question, force=options.force))


if __name__ == "__main__":
    main()
