"""An engine over Ray that does what its standard input says, a word a line; answers are JSON lines.

ask: tokens of a request, or its error. lost: waits until a rank is lost, and says why.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])  # in place of this file's folder

from quire import LLM, SamplingParams  # noqa: E402
from quire.base.errors import EngineError  # noqa: E402
from tests.waiting import wait_for  # noqa: E402

PROMPT = [5, 17, 30, 42, 8]


def settings(folder: str) -> dict[str, Any]:
    return {
        "model": folder,
        "tensor_parallel_size": 2,
        "max_model_len": 64,
        "num_kv_blocks": 128,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "quiet": True,
        "num_threads": 1,
    }


def ask(llm: LLM) -> list[int]:
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=3)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    assert output.error is None, output.error
    return list(output.outputs[0].token_ids)


def main(folder: str) -> None:
    with LLM(**settings(folder), distributed_executor_backend="ray") as llm:
        client: Any = llm.engine.client
        group = client._core._executor._group
        print(json.dumps({"ready": True}), flush=True)  # noqa: T201
        for line in sys.stdin:
            answer: dict[str, Any]
            if line.strip() == "lost":
                answer = {"lost": wait_for(lambda: group._lost, "notice", 30.0)}
            else:
                try:
                    answer = {"tokens": ask(llm)}
                except EngineError as error:
                    answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
