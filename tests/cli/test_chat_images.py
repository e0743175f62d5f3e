"""Images in `quire chat`: flags, commands, and paths that people type or drop."""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.entrypoints.cli.main import main
from quire.entrypoints.cli.texts.dialogue import pieces_of
from tests.client.scripted_server import Script, serve_script
from tests.image_writer import as_bytes, picture, write_vision_checkpoint

SEES = {"input_modalities": ["text", "image"]}


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    path = tmp_path / "my cat.png"
    path.write_bytes(as_bytes(picture(60, 40)))
    return path


def lines(monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("".join(text + "\n" for text in texts)))


def part_of(path: Path, kind: str = "png") -> dict[str, Any]:
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def contents(script: Script) -> list[list[Any]]:
    """Return what users said, in each request."""
    asked = [body["messages"] for path, body in script.seen if path == "/v1/chat/completions"]
    return [[each["content"] for each in messages if each["role"] == "user"] for messages in asked]


def test_images_are_sent_with_the_message_and_stay_in_the_conversation(
    cat: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photo = cat.with_name("photo.JPG")
    photo.write_bytes(as_bytes(picture(30, 20), "JPEG"))
    saved = cat.with_name("said.json")
    lines(
        monkeypatch, "What?", f"/image {cat}", f"Is {photo} larger?",
        f"'{cat}' {str(cat).replace(' ', chr(92) + ' ')}", f"/save {saved}",
    )  # fmt: skip
    script = Script(card=SEES)
    with serve_script(script) as url:
        assert main(["chat", "--url", url, "--image", str(cat), str(photo)]) == 0
    image, other = part_of(cat), part_of(photo, "jpeg")
    first = [image, other, text("What?")]
    second = [image, text("Is"), other, text("larger?")]
    assert contents(script) == [[first], [first, second], [first, second, [image, image]]]
    assert json.loads(saved.read_text())[0]["content"] == first
    shown = capsys.readouterr().err
    assert f"The next message shows {cat}." in shown
    assert f"{photo} is shown to the model" in shown


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("What is in HERE/a.png?", ["What is in", "HERE/a.png", "?"]),
        ("HERE/a.png", ["", "HERE/a.png", ""]),
        (r"HERE/with\ space.webp: what?", ["", "HERE/with space.webp", ": what?"]),
        ("'HERE/with space.webp' or \"HERE/a.png\"",
         ["", "HERE/with space.webp", "or", "HERE/a.png", ""]),
        ("see HERE/none.png, HERE/a.png", ["see HERE/none.png,", "HERE/a.png", ""]),
        ("HERE/notes.txt and a.png and x/HERE/a.png", None),
        ("~nobody/a.png, /a.png/ and https://example.org/a.png", None),
        (f"/{'x' * 5000}.png", None),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_paths_that_are_typed(typed: str, found: list[str] | None, tmp_path: Path) -> None:
    for name in ("a.png", "with space.webp", "notes.txt"):
        (tmp_path / name).touch()
    typed = typed.replace("HERE", str(tmp_path))
    wanted = [typed] if found is None else [each.replace("HERE", str(tmp_path)) for each in found]
    assert [str(each) for each in pieces_of(typed)] == wanted


def test_what_is_no_image_is_refused_by_its_name(
    cat: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the chat goes on."""
    bad = cat.with_name("bad.png")
    bad.write_bytes(cat.read_bytes()[:200])
    lines(monkeypatch, f"/image {bad}", "/image /none.png", f"See {bad}", "/image", "Hi")
    script = Script(card=SEES)
    with serve_script(script) as url:
        assert main(["chat", "--url", url]) == 0
        shown = capsys.readouterr().err
        assert main(["chat", "--url", url, "--image", str(bad), "-q", "Hi"]) == 2
        assert main(["chat", "--url", url, "--image", "none.png", "-q", "Hi"]) == 2
    assert contents(script) == [["Hi"]]
    assert shown.count(f"{bad} cannot be read as an image") == 2
    assert "there is no file '/none.png'" in shown and "/image FILE shows" in shown
    told = capsys.readouterr().err
    assert f"{bad} cannot be read as an image" in told and "there is no file 'none.png'" in told


def test_a_model_of_text_alone_gets_no_image(
    cat: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(monkeypatch, f"/image {cat}", f"Read '{cat}'")
    script = Script(card={"input_modalities": ["text"]})
    with serve_script(script) as url:
        assert main(["chat", "--url", url, "--image", str(cat), "-q", "Hi"]) == 2
        assert "takes text only. Name a model" in capsys.readouterr().err
        assert main(["chat", "--url", url]) == 0
    assert contents(script) == [[f"Read '{cat}'"]]
    shown = capsys.readouterr().err
    assert shown.count("takes text only. Name a model") == 1
    assert f"the model takes text only, so {cat} stays a text" in shown
    engine = ["--max-model-len", "128", "--num-threads", "1", "--quiet"]
    assert main(["chat", *engine, "--image", str(cat), "-q", "Hi"]) == 2
    assert "the bundled model in this process takes text only" in capsys.readouterr().err


def test_a_server_that_does_not_say_decides_itself(cat: Path) -> None:
    script = Script()
    with serve_script(script) as url:
        assert main(["chat", "--url", url, "--image", str(cat), "-q", "Hi"]) == 0
    assert contents(script) == [[[part_of(cat), text("Hi")]]]


class _Images(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/a")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(as_bytes(picture(60, 40)))

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def images() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Images) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_urls_are_fetched_here(cat: Path, images: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The host that was named may be in any network; one that it redirects to may not."""
    script = Script(card=SEES)
    with serve_script(script) as url:
        for name, status in ((f"{images}/a", 0), (cat.as_uri(), 0), (f"{images}/away", 2)):
            assert main(["chat", "--url", url, "--image", name, "-q", "Hi"]) == status
    assert contents(script) == [[[part_of(cat), text("Hi")]]] * 2
    assert "an address of the host is not a global one" in capsys.readouterr().err


def test_an_engine_in_this_process_sees_images(
    cat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each turn is what `LLM.chat` answers to the same messages."""
    folder = write_vision_checkpoint(tmp_path / "vision")
    flags = ["--dtype", "float32", "--max-model-len", "512", "--num-threads", "1", "--quiet"]
    lines(monkeypatch, "What?", "And?")
    asked = ["--image", str(cat), "--temperature", "0", "--max-tokens", "6"]
    assert main(["chat", str(folder), *flags, *asked]) == 0
    answers = capsys.readouterr().out
    params = SamplingParams(max_tokens=6, temperature=0.0)
    with LLM(str(folder), dtype="float32", quiet=True, max_model_len=512) as llm:
        messages: list[Any] = [{"role": "user", "content": [part_of(cat), text("What?")]}]
        wanted = ""
        for more in ("And?", None):
            (output,) = llm.chat(messages, params, use_tqdm=False)
            said = output.outputs[0].text
            wanted += said + ("" if said.endswith("\n") else "\n")
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": more}]
    assert answers == wanted
