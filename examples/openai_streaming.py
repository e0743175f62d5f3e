"""Stream a chat answer with the official OpenAI client.

    quire serve &
    python examples/openai_streaming.py "What is your name?"

The client needs no change: `base_url` names the server, and any key is accepted unless the server
was started with `--api-key`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from openai import OpenAI


def stream(client: OpenAI, question: str) -> Iterator[str]:
    """Yield the pieces of the answer as they arrive."""
    model = client.models.list().data[0].id
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"min_tokens": 1},  # a field of quire and vLLM that OpenAI does not have
    )
    for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content
        if chunk.usage is not None:
            yield f"\n[{chunk.usage.completion_tokens} tokens]\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Stream a chat answer.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    options = parser.parse_args(arguments)
    with OpenAI(base_url=options.url, api_key="none") as client:
        for piece in stream(client, options.question):
            sys.stdout.write(piece)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
