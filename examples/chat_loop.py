"""Talk with a model: each line is a message, an empty line ends the conversation.

    python examples/chat_loop.py [--model a/folder]

The whole conversation goes to the model each time. The cache keeps the earlier turns, so only the
new message is computed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from quire import LLM, SamplingParams


def chat(llm: LLM, read: Callable[[], str], write: Callable[[str], None]) -> list[dict[str, str]]:
    """Read messages and write answers until a message is empty. Returns the conversation."""
    conversation: list[dict[str, str]] = []
    params = SamplingParams(temperature=0.0, max_tokens=128)
    while message := read().strip():
        conversation.append({"role": "user", "content": message})
        (output,) = llm.chat(conversation, params, use_tqdm=False)
        answer = output.outputs[0].text
        write(f"{answer}\n  [{output.num_cached_tokens} tokens of the prompt came from the cache]")
        conversation.append({"role": "assistant", "content": answer})
    return conversation


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Talk with a model.")
    parser.add_argument("--model", help="the bundled one if unset")
    options = parser.parse_args(arguments)

    def read() -> str:
        try:
            return input("> ")
        except EOFError:
            return ""

    with LLM(options.model, quiet=True) as llm:
        chat(llm, read, print)


if __name__ == "__main__":
    main()
