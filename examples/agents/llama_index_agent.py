"""A tool agent of LlamaIndex over `quire serve`.

    pip install llama-index-core llama-index-llms-openai-like
    quire serve &
    python examples/agents/llama_index_agent.py "What is 6 times 7?" --force

Small models seldom call a tool by themselves: `--force` asks for a call in the first answer.
"""

import argparse
import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


async def ask(url: str, name: str, question: str, *, force: bool) -> None:
    model = OpenAILike(
        model=name, api_base=url, api_key="none", is_chat_model=True,
        is_function_calling_model=True, temperature=0, max_tokens=128, context_window=2048,
    )  # fmt: skip
    agent = FunctionAgent(
        tools=[FunctionTool.from_defaults(multiply)],
        llm=model,
        initial_tool_choice="multiply" if force else None,
    )
    running = agent.run(question, max_iterations=6)
    async for event in running.stream_events():
        if isinstance(event, ToolCallResult):
            sys.stdout.write(f"{event.tool_name}({event.tool_kwargs}) = {event.tool_output}\n")
    sys.stdout.write(f"{await running}\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Let an agent of LlamaIndex call a function.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--force", action="store_true", help="ask for a call at first")
    options = parser.parse_args(arguments)
    with OpenAI(base_url=options.url, api_key="none") as client:
        name = client.models.list().data[0].id
    asyncio.run(ask(options.url, name, options.question, force=options.force))


if __name__ == "__main__":
    main()
