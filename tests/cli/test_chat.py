"""`quire chat` and `quire complete`, against a scripted server and against the bundled model."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from quire.bundled import bundled_model_path
from quire.entrypoints.cli.flags import source as source_flags
from quire.entrypoints.cli.main import main
from quire.entrypoints.cli.texts.dialogue import print_answer
from quire.entrypoints.cli.texts.source import Piece, ServerSource
from quire.entrypoints.client import ServerAddress
from tests.client.scripted_server import Script, serve_script
from tests.waiting import WAIT_S

ENGINE = ["--max-model-len", "128", "--num-threads", "1", "--quiet"]


@pytest.fixture(autouse=True)
def no_default_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens on port 9, whatever runs on 8000."""
    monkeypatch.setattr(source_flags, "DEFAULT_URL", "http://127.0.0.1:9")


def lines(monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(text + "\n" for text in texts)))


def test_a_conversation_remembers_and_forgets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer that is not sent back makes every turn the first."""
    asked = "\ufeffHi", "", "And?", "/system Be brief.", "New", "/what", "/exit", "never"
    lines(monkeypatch, *asked)
    script = Script()
    with serve_script(script) as url:
        assert main(["chat", "--url", url, "--temperature", "0.5", "--seed", "7"]) == 0
    bodies = [body for path, body in script.seen if path == "/v1/chat/completions"]
    roles = [[message["role"] for message in body["messages"]] for body in bodies]
    assert roles == [["user"], ["user", "assistant", "user"], ["system", "user"]]
    assert bodies[1]["messages"][0]["content"] == "Hi"  # without the mark of byte order
    assert bodies[1]["messages"][1]["content"] == "Hello there."
    assert bodies[0]["model"] == "tiny"
    assert (bodies[0]["temperature"], bodies[0]["seed"]) == (0.5, 7)
    assert bodies[0]["stream_options"] == {"include_usage": True}
    shown = capsys.readouterr()
    assert shown.out == "Hello there.\n" * 3
    assert shown.err.count("first token after ") == 3
    assert "3 tokens in " in shown.err
    assert "/reset forgets" in shown.err


def test_thinking_is_shown_beside_the_answer_and_not_sent_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red when a user waits before an empty line, or a script reads thoughts as an answer."""
    lines(monkeypatch, "Hi", "And?")
    script = Script(thoughts=("A greeting", ", so"))
    with serve_script(script) as url:
        assert main(["chat", "--url", url]) == 0
    assert script.seen[1][1]["messages"][1] == {"role": "assistant", "content": "Hello there."}
    shown = capsys.readouterr()
    assert shown.out == "Hello there.\n" * 2
    assert shown.err.count("A greeting, so\n") == 2


THINKING_TEMPLATE = """
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.role == 'assistant' %}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- endif %}{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


def test_thinking_of_an_engine_in_this_process_is_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(THINKING_TEMPLATE)
    flags = [*ENGINE, "--chat-template", str(template), "--max-tokens", "4", "--temperature", "0"]
    assert main(["chat", *flags, "-q", "Hi"]) == 0
    thinking = capsys.readouterr()
    assert thinking.out == "\n"
    template.write_text(THINKING_TEMPLATE.replace("<think>\n{% endif %}", "{% endif %}"))
    assert main(["chat", *flags, "-q", "Hi"]) == 0
    answering = capsys.readouterr()
    assert answering.out.strip()
    assert len(thinking.err) > len(answering.err)


def test_a_full_context_forgets_the_oldest_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: every further message is refused, and the conversation is over."""
    lines(monkeypatch, "1", "2", "3", "4")
    script = Script(max_messages=4)
    with serve_script(script) as url:
        assert main(["chat", "--url", url, "--system-prompt", "Be brief."]) == 0
    asked = [[message["content"] for message in body["messages"]] for _, body in script.seen]
    said = "Hello there."
    assert asked == [
        ["Be brief.", "1"], ["Be brief.", "1", said, "2"], ["Be brief.", "1", said, "2", said, "3"],
        ["Be brief.", "2", said, "3"], ["Be brief.", "2", said, "3", said, "4"],
        ["Be brief.", "3", said, "4"],
    ]  # fmt: skip
    shown = capsys.readouterr()
    assert shown.err.count("so the oldest turn of the conversation will not be seen any more") == 2
    assert shown.out == f"{said}\n" * 4


def test_room_is_made_before_an_answer_has_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: a prompt that just fits leaves an answer of one token."""
    lines(monkeypatch, "1", "2", "3")
    script = Script(num_prompt_tokens=230)
    with serve_script(script) as url:
        assert main(["chat", "--url", url]) == 0
    assert [len(body["messages"]) for _, body in script.seen] == [1, 1, 1]
    assert capsys.readouterr().err.count("context is full") == 2


def test_a_message_that_never_fits_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(monkeypatch, "1", "2")
    with serve_script(Script(max_messages=0)) as url:
        assert main(["chat", "--url", url]) == 0
    assert capsys.readouterr().err.count("maximum context length is 256") == 2


def test_the_engines_own_context_is_kept_within(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(monkeypatch, *["Please tell me something about the sea, and the sky above it."] * 6)
    assert main(["chat", *ENGINE, "--temperature", "0", "--max-tokens", "16"]) == 0
    shown = capsys.readouterr().err
    assert "of the conversation will not be seen any more" in shown
    assert shown.count("first token after") == 6 and "error" not in shown
    lines(monkeypatch, "word " * 300)
    assert main(["chat", *ENGINE]) == 0
    assert "the context length is 128. Send less" in capsys.readouterr().err


def test_a_conversation_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, nowhere = tmp_path / "said.json", tmp_path / "none" / "said.json"
    lines(monkeypatch, "Grüße", f"/save {file}", f"/save {file}", f"/save {nowhere}", "/save")
    with serve_script(Script()) as url:
        assert main(["chat", "--url", url, "--system-prompt", "S"]) == 0
    messages = json.loads(file.read_text(encoding="utf-8"))
    assert [message["content"] for message in messages] == ["S", "Grüße", "Hello there."]
    shown = capsys.readouterr().err
    assert f"3 messages are in {file}." in shown and "is there already" in shown
    assert "cannot be written (No such file or directory)" in shown and "/save FILE writes" in shown


def test_variables_of_openais_clients_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_script(Script(api_key="k" * 16)) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        assert main(["chat", "-q", "Hi"]) == 2
        monkeypatch.setenv("OPENAI_API_KEY", "k" * 16)
        assert main(["chat", "-q", "Hi"]) == 0
        assert main(["complete", "-q", "Hi"]) == 0
        assert main(["chat", "-q", "Hi", "--api-key", "other"]) == 2
        monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
        assert main(["chat", "-q", "Hi", "--url", url]) == 0
        assert main(["chat", "-q", "Hi"]) == 1, "a server that was named is not passed over"
    assert capsys.readouterr().out == "Hello there.\n" * 3


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("https://models.example", "secret"),
        ("http://localhost:8000", "secret"),
        ("http://models.example", None),
    ],
)
def test_a_key_of_the_environment_crosses_no_network_in_the_clear(
    url: str, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert source_flags.openai_key(ServerAddress.parse(url)) == sent


@pytest.mark.parametrize(
    ("card", "flags", "sent"),
    [
        ({"default_sampling_params": {}}, [], {"temperature": 0.7, "min_p": 0.05}),
        ({"default_sampling_params": {"max_tokens": 9}}, [], {"temperature": 0.7, "min_p": 0.05}),
        ({"default_sampling_params": {}}, ["--top-p", "0.9"], {"temperature": 0.7, "top_p": 0.9}),
        ({"default_sampling_params": {}}, ["--temperature", "0"], {"temperature": 0.0}),
        (
            {"default_sampling_params": {}},
            ["--temperature", "1", "--min-p", "0", "--seed", "3"],
            {"temperature": 1.0, "min_p": 0.0, "seed": 3},
        ),
        ({"default_sampling_params": {"temperature": 0.3}}, [], {}),
        ({"default_sampling_params": {"top_k": 5}}, ["--seed", "3"], {"seed": 3}),
        ({}, [], {}),
    ],
    ids=str,
)
def test_a_model_without_sampling_defaults_does_not_babble(
    card: dict[str, object],
    flags: list[str],
    sent: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fault: a small model samples at temperature 1 over the whole vocabulary."""
    lines(monkeypatch, "Hi", "And?")
    script = Script(card=card)
    with serve_script(script) as url:
        assert main(["chat", "--url", url, *flags]) == 0
    names = ("temperature", "min_p", "top_p", "top_k", "seed")
    for _, body in script.seen:
        assert {name: body[name] for name in names if name in body} == sent
    ours = [name for name in sent if f"--{name.replace('_', '-')}" not in flags]
    assert capsys.readouterr().err.count("states no sampling defaults") == bool(ours)


def test_complete_one_text(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(words=("b", "c\n"))
    with serve_script(script) as url:
        asked = ["--model-name", "other", "--max-tokens", "5", "--stop", "x", "y"]
        assert main(["complete", "-q", "a", "--base-url", url + "/v1", *asked]) == 0
    body = script.seen[0][1]
    assert (body["prompt"], body["model"], body["max_tokens"]) == ("a", "other", 5)
    assert body["stop"] == ["x", "y"]
    assert capsys.readouterr().out == "bc\n"


def test_one_refused_message_does_not_end_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(monkeypatch, "one", "two")
    script = Script(fail="refuse")
    with serve_script(script) as url:
        assert main(["chat", "--url", url]) == 0
        assert main(["chat", "--url", url, "-q", "three"]) == 2
    assert [len(body["messages"]) for _, body in script.seen] == [1, 1, 1]
    assert capsys.readouterr().err.count("temperature is 9.0") == 3


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "No server answers at http://127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9", "--max-model-len", "64"], 2, "Leave out one of the two"),
        (["--url", "nowhere://x"], 2, "no address of a server"),
        (["/no/such/model", "--quiet"], 2, "/no/such/model"),
    ],
)
def test_what_newcomers_try_gets_one_line(
    arguments: list[str], status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *arguments]) == status
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "flags", "named"),
    [
        ("QUIRE_CPU_ISA", [], "'bogus'"),
        ("OMP_NUM_THREADS", ["--quiet"], "'bogus'"),
        ("OTHER", ["--quantization", "int5"], "'int5'"),
        ("OMP_NUM_THREADS", ["--temperature", "-1", "--num-threads", "1"], "temperature"),
        ("OTHER", ["/no/such/model"], "/no/such/model"),
    ],
)
@pytest.mark.parametrize("command", ["complete", "doctor", "serve"])
def test_what_has_no_meaning_is_refused_before_anything_is_said(
    command: str,
    variable: str,
    flags: list[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Turns red when a line says that a model loads, or a port is open, before the error."""
    if (command == "doctor" and flags) or (command == "serve" and "--temperature" in flags):
        pytest.skip("has no such flag")
    monkeypatch.setenv(variable, "bogus")
    port = [] if command != "serve" else ["--port", "0"]
    assert main([command, *flags, *port]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1, error


def test_a_model_that_the_server_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_script(Script()) as url:
        assert main(["complete", "--url", url, "--model-name", "big"]) == 2
    assert "no model 'big'. It has: tiny, other." in capsys.readouterr().err


def test_the_engine_of_this_process_answers_and_remembers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(monkeypatch, "What is your name?", "What is your name?")
    assert main(["chat", *ENGINE, "--temperature", "0", "--max-tokens", "8"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) >= 2
    assert "8 tokens in " in shown.err


@pytest.mark.parametrize("stated", [True, False])
def test_a_model_in_this_process_tells_its_defaults(
    stated: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(bundled_model_path(), model)
    if not stated:
        (model / "generation_config.json").unlink()
    assert main(["chat", str(model), *ENGINE, "-q", "Hi", "--max-tokens", "2"]) == 0
    assert ("so the chat uses --temperature 0.7 and --min-p 0.05" in capsys.readouterr().err) != (
        stated
    )


def test_without_a_server_the_bundled_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """The first thing that a newcomer types must work."""
    assert main(["complete", "-q", "import os", "--max-tokens", "4"]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip()
    assert "no server at http://127.0.0.1:9, so the bundled model answers" in shown.err
    assert "4 tokens in" in shown.err
    assert len(shown.err.split("\n")) <= 4, "the plan is for `quire plan`"


def test_an_engine_that_was_asked_for_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["--max-model-len", "128", "--num-threads", "1", "--max-tokens", "4"]
    assert main(["complete", "-q", "import os", *asked]) == 0
    shown = capsys.readouterr().err
    assert shown.startswith("quire: the bundled model is loaded in this process")
    assert "max_num_seqs" not in shown


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_ctrl_c_in_the_only_answer_is_the_status(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red when a script takes a cut answer for a whole one."""
    monkeypatch.setattr(ServerSource, command, lambda *_: cut_pieces([]))
    with serve_script(Script()) as url:
        assert main([command, "--url", url, "-q", "Hi"]) == 130
    assert capsys.readouterr().out == "so far\n"


def cut_pieces(closed: list[bool]) -> Generator[Piece]:
    """Ended by Ctrl-C. closed: gets a value when they are closed."""
    try:
        yield Piece("so ", 1)
        yield Piece("far", 2)
        raise KeyboardInterrupt
    finally:
        closed.append(True)


def test_ctrl_c_ends_the_answer_and_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[bool] = []
    ticks = iter((0.0, 0.25, 1.25))
    answer = print_answer(cut_pieces(closed), clock=lambda: next(ticks))
    assert closed == [True]
    assert answer.is_cut
    assert answer.text == "so far"
    expected = "stopped; first token after 250 ms, 2 tokens in 1.25 s, 1 tokens/s"
    assert answer.summary() == expected
    assert expected in capsys.readouterr().err


def test_ctrl_c_at_a_terminal_ends_the_answer_but_not_the_chat() -> None:
    """A person sees this: a terminal, a signal in the middle of an answer, another message."""
    script = Script(words=["word "] * 9000, gap_s=0.02)
    with serve_script(script) as url:
        main_end, terminal = pty.openpty()
        # A shell starts what it runs in the background, as these tests may be, without Ctrl-C.
        code = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from quire.entrypoints.cli.main import main; sys.exit(main())"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, "chat", "--url", url],
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        )  # fmt: skip
        os.close(terminal)
        try:
            shown = _read_until(main_end, "> ")
            os.write(main_end, b"Tell me all.\n")
            shown = _read_until(main_end, "word word ")
            process.send_signal(signal.SIGINT)
            shown = _read_until(main_end, "> ")
            assert "stopped; first token after" in shown
            assert script.closed_early.wait(WAIT_S)
            script.words, script.gap_s = ("Again",), 0.0
            os.write(main_end, b"More.\n")
            assert "Again" in _read_until(main_end, "tokens in")
            os.write(main_end, b"/exit\n")
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(main_end)
    last = script.seen[-1][1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant", "user"]
    assert last[1]["content"].startswith("word word ")


def _read_until(descriptor: int, wanted: str) -> str:
    """Return the text of a terminal until `wanted` has appeared after all that was read before."""
    data, deadline = b"", time.monotonic() + WAIT_S
    while wanted not in (shown := data.decode(errors="replace")) and time.monotonic() < deadline:
        data += os.read(descriptor, 4096)  # which may end amid a character
    assert wanted in shown, shown
    return shown


def test_a_text_in_place_of_the_model_is_told_from_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "import os"]) == 2
    assert capsys.readouterr().err == (
        "quire: error: 'import os' is no model; give a text behind -q: -q 'import os'.\n"
    )
