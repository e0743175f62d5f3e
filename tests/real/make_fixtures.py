"""Write what llama.cpp makes of `inputs`: `python -m tests.real.make_fixtures NAME MODEL.gguf`.

Run by hand, in an environment that has the package `xllamacpp`; CI reads only what it wrote.
"""

from __future__ import annotations

import gzip
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.real.inputs import CONVERSATIONS, PROMPTS, texts

FOLDER = Path(__file__).parent / "fixtures"
NUM_TOKENS = 64


def main(name: str, model: str, *special_tokens: str) -> None:
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params: Any = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = model, 1024, 1
    server: Any = xllamacpp.Server(params)

    def post(path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            server.listening_address + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def tokens(text: str, add_special: bool) -> list[int]:
        asked = {"content": text, "add_special": add_special, "parse_special": True}
        return post("/tokenize", asked)["tokens"]

    def answer(prompt: list[int]) -> dict[str, Any]:
        body = {"prompt": prompt, "n_predict": NUM_TOKENS, "temperature": 0, "n_probs": 2}
        found = post("/completion", {**body, "cache_prompt": False})
        steps = [step["top_logprobs"] for step in found["completion_probabilities"]]
        return {
            "prompt": prompt,
            "tokens": [step[0]["id"] for step in steps],
            "gaps": [round(step[0]["logprob"] - step[1]["logprob"], 4) for step in steps],
        }

    result = {
        "made_by": f"xllamacpp {xllamacpp.__version__}",
        "file": Path(model).name,
        "special_tokens": list(special_tokens),
        "texts": [tokens(text, False) for text in texts(list(special_tokens))],
        "chats": [post("/apply-template", {"messages": each})["prompt"] for each in CONVERSATIONS],
        "answers": [answer(tokens(prompt, True)) for prompt in PROMPTS],
    }
    FOLDER.mkdir(exist_ok=True)
    written = json.dumps(result, separators=(",", ":")).encode()
    (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(written, 9, mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
