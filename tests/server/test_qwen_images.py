"""A published size of image for Qwen-VL, through the SDK of OpenAI: the answer of transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from quire import LLM, SamplingParams
from quire.config.settings import EngineSettings
from quire.config.startup import find_model
from quire.engine.model_front import load_model_front
from quire.server.settings import ServerSettings
from tests.image_oracle import generated
from tests.image_writer import data_url, picture, write_qwen_checkpoint
from tests.server.in_memory import RealClient
from tests.server.running import running_server

NUM_TOKENS, NUM_TEXTS = 8, 15
SIZE = {"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS}
EXTRA = {"extra_body": {"ignore_eos": True}}


@pytest.mark.parametrize(
    ("kind", "patch", "num_image_tokens"), [("qwen2_5_vl", 14, 391), ("qwen3_vl", 16, 300)]
)
def test_the_answer_of_generate_alone_and_beside_texts(
    kind: str, patch: int, num_image_tokens: int, tmp_path: Path
) -> None:
    folder = write_qwen_checkpoint(tmp_path / "m", kind, patch=patch, processor={"size": SIZE})
    image = picture(640, 480)
    url = {"type": "image_url", "image_url": {"url": data_url(image)}}
    content = [{"type": "text", "text": "What is this?"}, url]
    asked: list[Any] = [{"role": "user", "content": content}]
    texts: list[Any] = [[{"role": "user", "content": f"Say {i}."}] for i in range(NUM_TEXTS)]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    settings = EngineSettings(model=str(folder))
    found = find_model(settings)
    small = {"dtype": "float32", "num_kv_blocks": 256, "max_model_len": 512}
    with LLM(str(folder), quiet=True, **small) as llm:
        (offline,) = llm.chat(asked, params, use_tqdm=False)
        ids = list(offline.prompt_token_ids)
        wanted = llm.get_tokenizer().decode(
            generated(folder, ids, [image], NUM_TOKENS), skip_special_tokens=True
        )
        texts_alone = [each.outputs[0].text for each in llm.chat(texts, params, use_tqdm=False)]
        llm.reset_prefix_cache()
        assert ids.count(found.spec.images.token_id) == num_image_tokens  # type: ignore[union-attr]
        front = load_model_front(settings, found.folder, found.spec)
        quiet = ServerSettings(disable_access_log=True)
        with (
            running_server(front, quiet, RealClient(llm)) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        ):

            def answer(messages: list[Any]) -> tuple[str | None, int]:
                made = client.chat.completions.create(
                    model="bundled", messages=messages, **GREEDY, **EXTRA
                )
                assert made.usage is not None
                return made.choices[0].message.content, made.usage.prompt_tokens

            def streamed() -> str:
                chunks = client.chat.completions.create(
                    model="bundled", messages=asked, stream=True, **GREEDY, **EXTRA
                )
                return "".join(each.choices[0].delta.content or "" for each in chunks)

            assert answer(asked) == (wanted, len(ids))
            assert streamed() == wanted
            llm.reset_prefix_cache()
            with ThreadPoolExecutor(NUM_TEXTS + 2) as threads:
                beside = [threads.submit(answer, each) for each in texts]
                whole, stream = threads.submit(answer, asked), threads.submit(streamed)
                assert whole.result() == (wanted, len(ids))
                assert stream.result() == wanted
                assert [each.result()[0] for each in beside] == texts_alone
            server.wait_until_idle()
