"""Images in chats, responses and messages: the answers of the engine alone, or an error with the
path of the part."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from quire import LLM, SamplingParams
from quire.base.errors import RequestError
from quire.config.settings import EngineSettings
from quire.config.startup import find_model
from quire.engine.model_front import ModelFront, load_model_front
from quire.server.batches.store import BatchStore
from quire.server.generation.kept_images import KeptImages, NamedImages
from quire.server.requests.limits import Limits
from quire.server.settings import ServerSettings
from quire.text.rendering.media.sources import ImageSource, StoredFile
from tests import waiting
from tests.image_writer import (
    IMAGE,
    TOKENS_PER_TILE,
    as_bytes,
    data_url,
    picture,
    write_gemma_checkpoint,
    write_vision_checkpoint,
)
from tests.server.in_memory import RealClient
from tests.server.running import PATIENT, RunningServer, running_server

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DATA = base64.b64encode(as_bytes(picture(100, 70))).decode()
URL = f"data:image/png;base64,{DATA}"
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(
        str(folder), quiet=True, dtype="float32", num_kv_blocks=256, max_model_len=512
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def front_of(folder: Path) -> ModelFront:
    found = find_model(EngineSettings(model=str(folder)))
    return load_model_front(EngineSettings(model=str(folder)), found.folder, found.spec)


@pytest.fixture(scope="module")
def served(folder: Path, llm: LLM, data_dir: Path) -> Iterator[RunningServer]:
    front = front_of(folder)
    limits = replace(PATIENT, max_named_images=2)
    settings = ServerSettings(disable_access_log=True, data_dir=str(data_dir), limits=limits)
    with running_server(front, settings, RealClient(llm)) as server:
        yield server


@pytest.fixture
def http(served: RunningServer, llm: LLM) -> Iterator[httpx.Client]:
    """Nothing that was sent may be left in the engine."""
    with waiting.PatientClient(base_url=served.url) as client:
        yield client
    served.wait_until_idle()
    worker = llm.engine.client._core._executor._worker  # type: ignore[attr-defined]
    waiting.wait_for(lambda: not worker._media._rows, "end of the images")


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> str:
    """The answer to the question about the image, without a server."""
    text = f"User:{IMAGE}What?<end_of_utterance>\nAssistant:"
    ids = llm.engine.renderer.render_prompt(text, add_special_tokens=False).token_ids
    given = {"prompt_token_ids": ids, "multi_modal_data": {"image": picture(100, 70)}}
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return llm.generate(given, params, use_tqdm=False)[0].outputs[0].text


def question(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]


def image(url: object = URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def asked(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "bundled", "messages": question(*parts), **GREEDY, **more}


@pytest.mark.parametrize(
    "part",
    [
        image(),
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL, "detail": "high"},
        {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}},
    ],
    ids=["object", "text", "input_image", "detail"],
)
def test_forms_of_parts(http: httpx.Client, wanted: str, part: dict[str, Any]) -> None:
    answer = http.post(CHAT, json=asked(part)).json()
    assert answer["choices"][0]["message"]["content"] == wanted
    assert answer["usage"]["prompt_tokens"] > 10 * TOKENS_PER_TILE


def test_a_stream_is_the_whole_answer(http: httpx.Client, wanted: str) -> None:
    text = ""
    with http.stream("POST", CHAT, json=asked(image(), stream=True)) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    assert text == wanted


def test_the_second_turn_finds_the_image_cached(http: httpx.Client) -> None:
    first = http.post(CHAT, json=asked(image())).json()
    num_prompt = first["usage"]["prompt_tokens"]
    messages = [
        *question(image()),
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "And?"},
    ]
    second = http.post(CHAT, json={"model": "bundled", "messages": messages, **GREEDY}).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= (num_prompt - 16) // 16 * 16


@pytest.fixture
def client(served: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as found:
        yield found


def test_the_sdk_of_openai(client: openai.OpenAI, http: httpx.Client, wanted: str) -> None:
    found = client.chat.completions.create(
        model="bundled",
        messages=question(image()),  # type: ignore[arg-type]
        temperature=0,
        max_tokens=8,
        extra_body={"ignore_eos": True},
    )
    assert found.choices[0].message.content == wanted
    parts = [
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": "What?"},
    ]
    response = client.responses.create(
        model="bundled",
        input=[{"role": "user", "content": parts}],  # type: ignore[arg-type, list-item]
        temperature=0,
        max_output_tokens=8,
        extra_body={"ignore_eos": True},
    )
    assert response.output_text == wanted
    following = client.responses.create(
        model="bundled",
        previous_response_id=response.id,
        input="And?",
        temperature=0,
        max_output_tokens=8,
        extra_body={"ignore_eos": True},
    )
    assert following.usage is not None and response.usage is not None
    assert following.usage.input_tokens > response.usage.input_tokens


def test_the_sdk_of_anthropic(served: RunningServer, http: httpx.Client, wanted: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    with anthropic.Anthropic(base_url=served.url, api_key="none") as client:
        found = client.messages.create(
            model="bundled",
            max_tokens=8,
            messages=question({"type": "image", "source": source}),  # type: ignore[arg-type]
            extra_body={"ignore_eos": True, "temperature": 0},
        )
    (block,) = found.content
    assert block.type == "text" and block.text == wanted


def test_langchain(served: RunningServer, http: httpx.Client, wanted: str) -> None:
    """LangChain is no dependency: install langchain-openai to run it."""
    chat_model: Any = pytest.importorskip("langchain_openai").ChatOpenAI
    model = chat_model(
        model="bundled",
        base_url=f"{served.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=8,
        extra_body={"ignore_eos": True},
    )
    for part in (
        {"type": "image", "base64": DATA, "mime_type": "image/png"},
        {"type": "image", "source_type": "base64", "data": DATA, "mime_type": "image/png"},
        image(),
    ):
        assert model.invoke(question(part)).content == wanted
        assert "".join(each.content for each in model.stream(question(part))) == wanted


def test_uploaded_files(client: openai.OpenAI, http: httpx.Client, wanted: str) -> None:
    """In each API; a later turn reads the file again."""
    file = client.files.create(file=("a.png", base64.b64decode(DATA)), purpose="vision")
    assert (file.purpose, file.bytes) == ("vision", len(base64.b64decode(DATA)))
    part: dict[str, Any] = {"type": "input_image", "file_id": file.id}
    given: dict[str, Any] = {"model": "bundled", "extra_body": {"ignore_eos": True}}
    given |= {"temperature": 0, "max_output_tokens": 8}
    said = [{"role": "user", "content": [part, {"type": "input_text", "text": "What?"}]}]
    response = client.responses.create(input=said, **given)  # type: ignore[arg-type]
    assert response.output_text == wanted
    second = client.responses.create(input="And?", previous_response_id=response.id, **given)
    assert second.usage is not None and second.usage.input_tokens > 10 * TOKENS_PER_TILE
    answer = http.post(CHAT, json=asked(part)).json()
    assert answer["choices"][0]["message"]["content"] == wanted
    source = {"type": "image", "source": {"type": "file", "file_id": file.id}}
    body = {"model": "bundled", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    answer = http.post(MESSAGES, json={**body, "messages": question(source)}).json()
    assert answer["content"][0]["text"] == wanted

    client.files.delete(file.id)
    for route, data, place in (
        (CHAT, asked(part), "messages[0].content[0].file_id"),
        (MESSAGES, {**body, "messages": question(source)}, "messages[0].content[0].source.file_id"),
        (RESPONSES, {"model": "bundled", "input": said}, "input[0].content[0].file_id"),
    ):
        found = http.post(route, json=data)
        assert found.status_code == 400, found.text
        assert f"{place} cannot be read. There is no file '{file.id}'" in found.text


def test_uploaded_files_that_are_no_images(http: httpx.Client) -> None:
    form = {"file": ("a.txt", b"some text")}
    kept = http.post("/v1/files", files=form, data={"purpose": "user_data"}).json()
    found = http.post(CHAT, json=asked({"type": "input_image", "file_id": kept["id"]}))
    assert found.status_code == 400
    assert "content[0].file_id cannot be read as an image" in found.text
    batch = {"input_file_id": kept["id"], "endpoint": CHAT, "completion_window": "24h"}
    found = http.post("/v1/batches", json=batch)
    assert found.status_code == 400 and "has the purpose 'user_data'" in found.text
    found = http.post(CHAT, json=asked({**image(), "file_id": kept["id"]}))
    assert found.status_code == 400 and "image_url and file_id: send one of them" in found.text


def test_files_of_others_are_not_there(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, Limits(), tenants=("one", "two"))
    file_id = store.add_file("a.png", "vision", b"x" * 10, "one").id

    def path_of(file_id: str, tenant: str) -> Path:
        return store.path(store.find_file(file_id, tenant).id)

    kept, source = (
        KeptImages(NamedImages(Limits(), None), path_of),
        ImageSource("here", StoredFile(file_id)),
    )
    assert kept.read(source, "one", 10) == b"x" * 10
    assert kept.read(source, "one", 5) == b"x" * 6, "enough to be refused as too long"
    with pytest.raises(RequestError, match=r"here cannot be read\. There is no file"):
        kept.read(source, "two", 10)
    (tmp_path / "files" / file_id).unlink()
    with pytest.raises(RequestError, match=r"here cannot be read\. There is no file"):
        kept.read(source, "one", 10)
    store.close()


def test_images_by_uuid(http: httpx.Client, llm: LLM, wanted: str) -> None:
    """An image is sent once; later parts name it. The name of another image is that one's."""
    first = {"type": "image_url", "image_url": {"url": URL}, "uuid": "cat"}
    assert http.post(CHAT, json=asked(first)).status_code == 200
    encoder = llm.engine.client._core._executor._worker._images  # type: ignore[attr-defined]
    before = encoder.num_encoded
    for part in (
        {"type": "image_url", "image_url": None, "uuid": "cat"},
        {"type": "image_url", "uuid": "cat"},
        {"type": "image_url", "image_url": {"url": None, "detail": "high"}, "uuid": "cat"},
        {"type": "input_image", "uuid": "cat"},
    ):
        answer = http.post(CHAT, json=asked(part)).json()
        assert answer["choices"][0]["message"]["content"] == wanted
    body = {"model": "bundled", "temperature": 0, "max_output_tokens": 8, "ignore_eos": True}
    text = {"type": "input_text", "text": "What?"}
    said = [{"role": "user", "content": [{"type": "input_image", "uuid": "cat"}, text]}]
    response = http.post(RESPONSES, json={**body, "input": said}).json()
    assert response["output"][0]["content"][0]["text"] == wanted
    more = {"input": "And?", "previous_response_id": response["id"]}
    assert http.post(RESPONSES, json={**body, **more}).status_code == 200
    assert encoder.num_encoded == before

    other = data_url(picture(100, 70, seed=5))
    assert http.post(CHAT, json=asked(image(other, uuid="cat"))).status_code == 200
    renamed = http.post(CHAT, json=asked({"type": "image_url", "uuid": "cat"})).json()
    given = http.post(CHAT, json=asked(image(other))).json()
    assert renamed["choices"][0]["message"] == given["choices"][0]["message"]
    low = asked({"type": "image_url", "image_url": {"url": None, "detail": "low"}, "uuid": "cat"})
    usage = http.post(CHAT, json=low).json()["usage"]
    assert usage["prompt_tokens"] < given["usage"]["prompt_tokens"] - 5 * TOKENS_PER_TILE


def test_images_of_gemma_by_uuid(tmp_path: Path) -> None:
    """Tokens of an image see each other, and line ends come around it."""
    folder, sent = write_gemma_checkpoint(tmp_path / "gemma"), image(uuid="cat")
    named = {"type": "image_url", "uuid": "cat"}
    small = {"dtype": "float32", "num_kv_blocks": 64, "max_model_len": 256}
    with LLM(str(folder), quiet=True, **small) as llm:
        front = front_of(folder)
        settings = ServerSettings(disable_access_log=True)
        with running_server(front, settings, RealClient(llm)) as server:
            with waiting.PatientClient(base_url=server.url) as http:
                bodies = [asked(*parts) for parts in ((sent,), (named,), (named, named, sent))]
                found = [http.post(CHAT, json=body).json() for body in bodies]
            server.wait_until_idle()
        texts = [each["choices"][0]["message"]["content"] for each in found]
        assert texts[0] == texts[1] != texts[2]
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        for body, text in ((asked(image()), texts[0]), (asked(*[image()] * 3), texts[2])):
            llm.reset_prefix_cache()
            (alone,) = llm.chat(body["messages"], params, use_tqdm=False)
            assert alone.outputs[0].text == text


def test_images_that_were_refused_have_no_name(http: httpx.Client) -> None:
    bad = "data:image/png;base64,iVBORw0KGgo="
    assert http.post(CHAT, json=asked(image(bad, uuid="bad"))).status_code == 400
    found = http.post(CHAT, json=asked({"type": "image_url", "uuid": "bad"}))
    assert found.status_code == 400
    words = "messages[0].content[0].uuid is 'bad', and no image of that name is kept"
    assert words in found.json()["error"]["message"]


def test_names_of_images_are_their_callers() -> None:
    """The caller with the most loses its least recently used image first."""
    seconds = itertools.count()
    limits = Limits(max_named_images=3, max_named_image_bytes=100)
    named = NamedImages(limits, None, lambda: float(next(seconds)))
    named.put("a", "one", b"1" * 10)
    assert named.find("a", "two") is None
    named.put("a", "two", b"2" * 10)
    assert named.find("a", "one") == b"1" * 10 and named.find("a", "two") == b"2" * 10
    named.put("b", "one", b"3" * 10)
    named.put("a", "one", b"4" * 20)
    assert (named.num_kept, named.num_bytes) == (3, 40)
    named.put("c", "one", b"5" * 10)
    assert named.find("b", "one") is None and named.find("a", "one") == b"4" * 20
    named.put("d", "one", b"6" * 60)
    assert named.num_bytes <= 100 and named.find("a", "two") == b"2" * 10
    named.close()


def test_images_in_results_of_tools(http: httpx.Client) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [{"type": "text", "text": "shot"}, {"type": "image", "source": source}],
    }
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    body = {
        "model": "bundled",
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    }
    without = {**body, "messages": body["messages"][:1]}
    counts = [
        http.post("/v1/messages/count_tokens", json=each).json()["input_tokens"]
        for each in (body, without)
    ]
    assert counts[0] - counts[1] > 10 * TOKENS_PER_TILE


def test_counts_of_tokenize_are_those_of_usage(http: httpx.Client) -> None:
    used = http.post(CHAT, json=asked(image())).json()["usage"]["prompt_tokens"]
    found = http.post("/tokenize", json={"model": "bundled", "messages": question(image())})
    assert found.json()["count"] == used


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (image("data:image/png;base64,iVBORw0KGgo="), "content[0].image_url.url cannot be read"),
        (image("data:image/png;base64,iVBOR w0KGgo="), "content[0].image_url.url is no base64"),
        (image("data:image/png;base64," + base64.b64encode(b"<svg/>").decode()), "as an image"),
        (image("https://example.org/a.png"), "allowed_media_domains"),
        (image("http://169.254.169.254/latest"), "allowed_media_domains"),
        (image("file:///etc/hostname"), "allowed_local_media_path"),
        (image("/etc/hostname"), "give a data: URL"),
        (image(None), "content[0].image_url.url is missing"),
        (image(URL, detail="x") | {"detail": 3}, "detail"),
        ({"type": "image"}, "content[0].image is missing"),
        ({"type": "image", "index": 0}, "content[0].image is missing"),
        ({"type": "input_image", "file_id": "file-1"}, "There is no file 'file-1'"),
        ({"type": "image_url", "uuid": "none"}, "content[0].uuid is 'none', and no image of"),
        (image(uuid=""), "content[0].uuid is '': send a text of 1 to 256"),
        (image(uuid=3), "content[0].uuid is 3: send a text of 1 to 256"),
        ({"type": "input_image", "file_id": 1}, "content[0].file_id is 1: send the id"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "for audio"),
        ({"type": "video_url", "video_url": {"url": URL}}, "for video"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals_name_the_part(http: httpx.Client, part: dict[str, Any], words: str) -> None:
    answer = http.post(CHAT, json=asked(part))
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_too_many_images(http: httpx.Client) -> None:
    answer = http.post(CHAT, json=asked(*[image()] * 17))
    assert answer.status_code == 400
    assert "at most 16" in answer.json()["error"]["message"]


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_encoded(
    http: httpx.Client, llm: LLM
) -> None:
    encoder = llm.engine.client._core._executor._worker._images  # type: ignore[attr-defined]
    before = encoder.num_encoded
    wide = base64.b64encode(as_bytes(picture(90, 80, seed=77))).decode()
    parts = [image(f"data:;base64,{wide}")] * 8
    answer = http.post(CHAT, json=asked(*parts, max_tokens=400))
    assert answer.status_code == 400 and "maximum context length" in answer.text
    assert encoder.num_encoded == before


def test_metrics_count_images_and_those_that_were_kept(http: httpx.Client, llm: LLM) -> None:
    names = ("vllm:mm_cache_queries_total", "vllm:mm_cache_hits_total", "quire:mm_cache_bytes")

    def readings() -> list[float]:
        lines = http.get("/metrics").text.splitlines()
        found = {line.partition("{")[0]: float(line.split()[-1]) for line in lines if "{" in line}
        return [found[name] for name in names]

    new = data_url(picture(50, 50, seed=99))
    before = readings()
    for _ in range(3):
        assert http.post(CHAT, json=asked(image(new))).status_code == 200
    queries, hits, kept = (now - then for now, then in zip(readings(), before, strict=True))
    num_tokens = 10 * TOKENS_PER_TILE
    assert (queries, hits) == (3, 2) and kept == num_tokens * llm.engine.spec.hidden_size * 4
    own = {each.name: each.value for each in llm.get_metrics()}
    assert own["vllm:mm_cache_queries"] == before[0] + 3


def test_texts_beside_images_are_served_as_before(http: httpx.Client, llm: LLM) -> None:
    body = {"model": "bundled", "messages": [{"role": "user", "content": "Hi"}], **GREEDY}
    answer = http.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    (alone,) = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
    assert answer == alone.outputs[0].text


@pytest.mark.parametrize("route", [CHAT, MESSAGES])
def test_sessions_keep_their_images(http: httpx.Client, route: str) -> None:
    """A turn sends what is new alone, and the image of the first turn is there."""
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    parts = {CHAT: image(), MESSAGES: {"type": "image", "source": source}}
    more = {"model": "bundled", "session_id": f"of {route}", "max_tokens": 8, "ignore_eos": True}
    counts: list[int] = []
    for messages in (question(parts[route]), [{"role": "user", "content": "And?"}]):
        answer = http.post(route, json={**more, "messages": messages})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        cached = usage.get("cache_read_input_tokens", 0)
        counts.append(usage.get("prompt_tokens", usage.get("input_tokens", 0) + cached))
    assert counts[1] > counts[0] > 10 * TOKENS_PER_TILE


@pytest.mark.parametrize("route", [CHAT, RESPONSES])
def test_a_conversation_over_an_image_that_is_kept_no_more(http: httpx.Client, route: str) -> None:
    """The error names the part and the image; a turn that sends the image again goes on."""
    name, is_chat = f"gone {route}", route == CHAT
    sent: dict[str, Any] = {"type": "input_image", "image_url": URL, "uuid": name}
    named = {"type": "input_image", "uuid": name}
    text = {"type": "text" if is_chat else "input_text", "text": "What?"}

    def turn(*parts: dict[str, Any], **more: Any) -> httpx.Response:
        said = [{"role": "user", "content": [*parts, text]}]
        field, bound = ("messages", "max_tokens") if is_chat else ("input", "max_output_tokens")
        return http.post(route, json={"model": "bundled", field: said, bound: 8, **more})

    assert turn(sent).status_code == 200
    more: dict[str, Any] = {"session_id": f"over {name}"} if is_chat else {}
    first = turn(named, **more)
    assert first.status_code == 200, first.text
    if not is_chat:
        more = {"previous_response_id": first.json()["id"]}
    for other in ("one", "two"):
        assert http.post(CHAT, json=asked(image(uuid=other))).status_code == 200
    answer = turn(**more)
    assert answer.status_code == 400
    place = "messages[0].content[0].uuid" if is_chat else "input[0].content[0].uuid"
    words = f"{place} is '{name}', and no image of that name is kept: send the image with its uuid"
    assert words in answer.json()["error"]["message"]
    assert turn(sent, **more).status_code == 200
    assert turn(**more).status_code == 200


def test_places_are_those_of_the_request(http: httpx.Client) -> None:
    """Messages and responses become chats, whose paths nobody sent."""
    bad = base64.b64encode(b"<svg/>").decode()
    source = {"type": "base64", "media_type": "image/png", "data": bad}
    body = {"model": "bundled", "max_tokens": 8}
    answer = http.post(
        MESSAGES, json={**body, "messages": question({"type": "image", "source": source})}
    )
    assert answer.status_code == 400
    assert "messages[0].content[0].source.data cannot be read" in answer.text
    part = {"type": "input_image", "image_url": f"data:;base64,{bad}"}
    given = [{"type": "message", "role": "user", "content": [part]}]
    answer = http.post(RESPONSES, json={"model": "bundled", "input": given})
    assert answer.status_code == 400
    assert "input[0].content[0].image_url cannot be read" in answer.text
