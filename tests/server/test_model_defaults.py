"""Defaults of a model's `generation_config.json`, in `LLM` and over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, ConfigError, RequestError, SamplingParams
from quire.bundled import bundled_model_path
from quire.config.settings import EngineSettings
from quire.config.startup import find_model
from quire.engine.model_front import ModelFront
from tests import waiting
from tests.server.in_memory import RealClient
from tests.server.one_request import CHAT, END, SPACE_A, TEXT, A, B, post
from tests.server.running import RunningServer, running_server


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(quiet=True, num_kv_blocks=512, max_model_len=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(llm: LLM, front: ModelFront) -> Iterator[RunningServer]:
    with running_server(front, client=RealClient(llm)) as found:
        yield found


@pytest.fixture(scope="module")
def with_defaults(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(**values: object) -> Path:
        folder = tmp_path_factory.mktemp("model")
        shutil.copytree(bundled_model_path(), folder, dirs_exist_ok=True)
        (folder / "generation_config.json").write_text(json.dumps(values))
        return folder

    return make


@pytest.mark.parametrize("bound", [512, 10**9, 300])
def test_a_default_bound_is_cut_to_the_room(llm: LLM, front: ModelFront, bound: int) -> None:
    """Only a number of the client's own is refused."""
    ending = {"allowed_token_ids": [END]}
    front = replace(front, default_sampling={"max_tokens": bound})
    long = [60] * 500
    with running_server(front, client=RealClient(llm)) as server:
        with waiting.PatientClient(base_url=server.url) as http:
            for fields in (
                {}, {"n": 2}, {"prompt": long}, {"prompt": long, "truncate_prompt_tokens": -1},
                {"prompt": long, "truncate_prompt_tokens": 400}, {"stream": True},
                {"use_beam_search": True}, {"min_tokens": 301, "allowed_token_ids": [A]},
            ):  # fmt: skip
                reply = post(http, TEXT, {**ending, **fields})
                assert reply.status_code == 200, (fields, reply.text)
            assert post(http, CHAT, ending).status_code == 200
            filling = post(http, TEXT, {"prompt": long, "allowed_token_ids": [A]}).json()
            assert filling["usage"]["completion_tokens"] == 12
            for path, field in ((TEXT, "max_tokens"), (CHAT, "max_completion_tokens")):
                reply = post(http, path, {**ending, field: 512})
                assert reply.status_code == 400
                assert reply.json()["error"]["param"] == field
        server.wait_until_idle()


def test_the_default_of_completions_is_cut_too(http: httpx.Client) -> None:
    """16 tokens, if neither request nor model say otherwise."""
    fields: dict[str, Any] = {"allowed_token_ids": [A]}
    for num_prompt, expected in ((3, 16), (500, 12)):
        reply = post(http, TEXT, {**fields, "prompt": [60] * num_prompt})
        assert reply.json()["usage"]["completion_tokens"] == expected, reply.text
    reply = post(http, TEXT, {**fields, "min_tokens": 20})
    assert reply.json()["usage"]["completion_tokens"] == 20, reply.text


def test_an_llm_cuts_default_bounds_too(with_defaults: Callable[..., Path]) -> None:
    """Also where the prompt arrives in pieces, of which nobody knows how many will come."""
    folder = with_defaults(max_new_tokens=128, temperature=0.5)
    with LLM(str(folder), quiet=True, max_model_len=128, num_kv_blocks=32) as engine:
        (output,) = engine.generate([[60] * 100], use_tqdm=False)
        assert output.error is None
        *_, last = engine.stream([60] * 100)
        assert last.finished
        with engine.open_prompt() as prompt:
            for token in (60, 61):
                prompt.append([token] * 50)
            assert prompt.finish().finished
        own = engine.open_prompt(SamplingParams(max_tokens=100))
        with own as prompt, pytest.raises(RequestError, match="may have 50"):
            for token in (60, 61):
                prompt.append([token] * 50)
        defaults = engine.get_default_sampling_params()
        assert (defaults.max_tokens, defaults.temperature) == (128, 0.5)


def test_what_a_model_recommends_is_obeyed(
    llm: LLM, front: ModelFront, with_defaults: Callable[..., Path]
) -> None:
    """Ends, least lengths and banned tokens too, unless a request names its own."""
    folder = with_defaults(
        stop_strings=["zz", ""],
        min_new_tokens=20,
        suppress_tokens=[A, 10**6],
        bad_words_ids=[[B, SPACE_A], [END]],
        eos_token_id=END,
    )
    defaults = find_model(EngineSettings(model=str(folder))).spec.generation.sampling()
    assert defaults == {
        "stop": ["zz"],
        "min_tokens": 20,
        "bad_words_token_ids": [[A], [B, SPACE_A]],
    }
    front = replace(front, default_sampling=defaults)
    only = {"allowed_token_ids": [A, B]}
    with running_server(front, client=RealClient(llm)) as server:
        with waiting.PatientClient(base_url=server.url) as http:

            def drawn(**fields: object) -> tuple[str, int]:
                found = post(http, TEXT, {**only, **fields}).json()
                assert "choices" in found, found
                return found["choices"][0]["text"], found["usage"]["completion_tokens"]

            assert drawn() == ("b" * 20, 20)
            assert drawn(max_tokens=3) == ("bbb", 3)
            assert drawn(max_tokens=3, bad_words=["x"]) == ("bbb", 3)
            assert drawn(max_tokens=3, min_tokens=1) == ("bbb", 3)
            assert drawn(use_beam_search=True, max_tokens=2)[1] == 2
            reply = post(http, TEXT, {**only, "max_tokens": 2, "min_tokens": 3})
            assert reply.status_code == 400
            card = http.get("/v1/models").json()["data"][0]
            assert card["default_sampling_params"] == defaults
        server.wait_until_idle()


def test_what_a_model_recommends_in_vain_is_named_once(
    with_defaults: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_defaults(
        do_sample=False, begin_suppress_tokens=[1], no_repeat_ngram_size=3, num_beams=1,
        typical_p=1.0, temperature=0.5, use_cache=True, forced_eos_token_id=None, stop_strings="",
    )  # fmt: skip
    with LLM(str(folder), quiet=True, max_model_len=64, num_kv_blocks=32):
        pass
    (line,) = [each.message for each in caplog.records if "not obeyed" in each.message]
    assert line == (
        f"{folder / 'generation_config.json'}: not obeyed: begin_suppress_tokens=[1], "
        "do_sample=False, no_repeat_ngram_size=3; requests can say how tokens are drawn"
    )
    caplog.clear()
    assert find_model(EngineSettings(model=str(folder), generation_config="none")).spec
    assert not caplog.records


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("min_new_tokens", -1), ("stop_strings", 3), ("stop_strings", ["a", 3]),
        ("suppress_tokens", ["x"]), ("bad_words_ids", [[1], 2]), ("bad_words_ids", [["x"]]),
        ("max_new_tokens", 0), ("max_new_tokens", -1), ("max_new_tokens", 2**31),
        ("max_new_tokens", "many"), ("temperature", -0.5), ("temperature", float("nan")),
        ("temperature", 10**400), ("top_p", -0.1), ("top_p", 1.5), ("top_k", -2), ("top_k", 2.5),
        ("min_p", 2), ("repetition_penalty", 0), ("repetition_penalty", float("inf")),
        ("eos_token_id", -1), ("eos_token_id", [9, "x"]),
    ],
)  # fmt: skip
def test_defaults_without_a_meaning_are_found_at_start(
    with_defaults: Callable[..., Path], key: str, value: object
) -> None:
    folder = with_defaults(**{key: value})
    with pytest.raises(ConfigError) as caught:
        find_model(EngineSettings(model=str(folder)))
    assert str(folder / "generation_config.json") in str(caught.value)
    assert key in str(caught.value)
    unread = EngineSettings(model=str(folder), generation_config="none")
    if key == "eos_token_id":
        with pytest.raises(ConfigError):
            find_model(unread)
    else:
        assert find_model(unread).spec.generation.sampling() == {}
