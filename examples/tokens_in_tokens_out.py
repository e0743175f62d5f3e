"""Send token ids to a server and get token ids back, without any text in between.

    quire serve &
    python examples/tokens_in_tokens_out.py 5 6 7

Training loops and routers need exact tokens: text that is tokenized again may become other tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from http.client import HTTPResponse
from itertools import chain
from typing import Any
from urllib.request import Request, urlopen


def generate(url: str, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """Return the ids of the next tokens and their log-probabilities."""
    sampling = {"max_tokens": max_tokens, "seed": 0, "ignore_eos": True, "logprobs": 0}
    with post(url, {"token_ids": prompt, "sampling_params": sampling}) as response:
        (choice,) = json.load(response)["choices"]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def stream(url: str, prompt: list[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the ids of the next tokens as they come."""
    sampling = {"max_tokens": max_tokens, "seed": 0, "ignore_eos": True}
    with post(url, {"token_ids": prompt, "sampling_params": sampling, "stream": True}) as response:
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["token_ids"]


def post(url: str, body: dict[str, Any]) -> HTTPResponse:
    """Send a request to the route of token ids."""
    request = Request(
        f"{url}/inference/v1/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    return urlopen(request)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Continue a list of token ids.")
    parser.add_argument("tokens", type=int, nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=8)
    options = parser.parse_args(arguments)
    token_ids, logprobs = generate(options.url, options.tokens, options.max_tokens)
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        print(token_id, round(logprob, 3))
    pieces = stream(options.url, options.tokens, options.max_tokens)
    print("the same as a stream:", list(chain.from_iterable(pieces)) == token_ids)


if __name__ == "__main__":
    main()
