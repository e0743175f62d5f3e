"""Send token ids to a server and get token ids back, without any text in between.

    quire serve &
    python examples/tokens_in_tokens_out.py 5 6 7

Training loops and routers need exact tokens: text that is tokenized again may become other tokens.
"""

from __future__ import annotations

import argparse
import json
from urllib.request import Request, urlopen


def generate(url: str, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """Return the ids of the next tokens and their log-probabilities."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    request = Request(
        f"{url}/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urlopen(request) as response:
        (choice,) = json.load(response)["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Continue a list of token ids.")
    parser.add_argument("tokens", type=int, nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=8)
    options = parser.parse_args(arguments)
    token_ids, logprobs = generate(options.url, options.tokens, options.max_tokens)
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        print(token_id, round(logprob, 3))


if __name__ == "__main__":
    main()
