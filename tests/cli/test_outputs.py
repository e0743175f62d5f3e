"""Files that commands write: checked before any work, and nothing that is there is lost."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.base.platform.outputs import check_output
from quire.entrypoints.cli.main import main
from tests.waiting import WAIT_S

MODEL = str(Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-0.6b")
LINE = '{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}\n'

COMMANDS = {
    "run-batch": ["run-batch", "-i", "IN", "-o", "OUT"],
    "latency": ["bench", "latency", "--output-json", "OUT"],
    "throughput": ["bench", "throughput", "--output-json", "OUT"],
    "bench-serve": ["bench", "serve", "--port", "1", "--output-json", "OUT"],
    "html": ["plan", MODEL, "--load-format", "dummy", "--html", "OUT"],
    "plot": ["plan", MODEL, "--load-format", "dummy", "--workload", "IN", "--plot", "OUT"],
    "convert": ["convert", MODEL, "OUT"],
    "trace": ["serve", "--port", "0", "--record-trace", "OUT"],
    "view": ["serve", "--port", "0", "--record-ui", "OUT"],
}


def run(command: str, source: Path, target: Path) -> int:
    named = {"IN": str(source), "OUT": str(target)}
    return main([named.get(word, word) for word in COMMANDS[command]])


def _below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("kept")
    return folder / "file" / "out"


def _in_no_filesystem(folder: Path) -> Path:
    (folder / "link").symlink_to("/proc/no-such-folder/out")
    return folder / "link"


def _long(folder: Path) -> Path:
    return folder / ("x" * 300)


@pytest.mark.parametrize("place", [_below_a_file, _in_no_filesystem, _long])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    command: str,
    place: Callable[[Path], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(LINE)
    assert run(command, source, place(tmp_path)) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "loaded" not in shown.err, "it began to work"
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "convert"])
def test_a_folder_or_a_socket_is_no_output(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(LINE)
    assert run(command, source, tmp_path) == 2
    assert "which is a folder" in capsys.readouterr().err
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        assert run(command, source, tmp_path / "socket") == 2
    assert "neither a file nor a pipe" in capsys.readouterr().err


def _itself(source: Path) -> Path:
    return source


def _dotted(source: Path) -> Path:
    return source.parent / "sub" / ".." / source.name


def _hard_link(source: Path) -> Path:
    os.link(source, source.parent / "hard")
    return source.parent / "hard"


def _chain(source: Path) -> Path:
    (source.parent / "one").symlink_to(source)
    (source.parent / "two").symlink_to("one")
    return source.parent / "two"


@pytest.mark.parametrize("disguise", [_itself, _dotted, _hard_link, _chain])
@pytest.mark.parametrize("command", ["run-batch", "plot"])
def test_the_input_is_no_output_in_any_disguise(
    command: str,
    disguise: Callable[[Path], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fault: answers took the place of the requests, and the status was 0."""
    source = tmp_path / "in.jsonl"
    source.write_text(LINE)
    (tmp_path / "sub").mkdir()
    assert run(command, source, disguise(source)) == 2
    assert "is read, too" in capsys.readouterr().err
    assert source.read_text() == LINE


def test_other_files_that_are_read_are_no_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unfinished answers go to OUT.partial, which would have been cut; a page took the place of a
    model."""
    source = tmp_path / "out.jsonl.partial"
    source.write_text(LINE)
    assert run("run-batch", source, tmp_path / "out.jsonl") == 2
    assert "is read, too" in capsys.readouterr().err
    config = tmp_path / "serve.yaml"
    config.write_text("max-model-len: 64\n")
    for given in (["plan", "--config", str(config), "--html", str(config)],
                  ["serve", "--config", str(config), "--record-trace", str(config)],
                  ["serve", "--config", str(config), "--record-ui", str(config)],
                  ["plan", MODEL, "--html", str(Path(MODEL) / "config.json")]):  # fmt: skip
        before = Path(given[-1]).read_text()
        assert main(given) == 2
        assert "is read, too" in capsys.readouterr().err
        assert Path(given[-1]).read_text() == before
    assert source.read_text() == LINE


def test_a_text_that_no_file_can_be_named_by_is_none_that_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: a template of more than 255 characters could not be given beside an output."""
    for text in ("{{ messages }}" * 30, "a=" + "b" * 300, "a\0b"):
        check_output("it", tmp_path / "out", [Path(text)])
    given = [
        "-i",
        str(tmp_path / "none"),
        "-o",
        str(tmp_path / "out"),
        "--chat-template",
        "x" * 300,
    ]
    assert main(["run-batch", *given]) == 2
    assert "File name too long" not in capsys.readouterr().err


def test_a_link_is_written_through_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    """Fault: both were replaced by a file."""
    (tmp_path / "real").write_text("old and longer")
    os.link(tmp_path / "real", tmp_path / "hard")
    for name, goal in (("link", "real"), ("dangling", "new")):
        (tmp_path / name).symlink_to(goal)
        check_output("it", tmp_path / name).write("text")
        assert (tmp_path / name).is_symlink() and (tmp_path / goal).read_text() == "text"
    assert (tmp_path / "hard").read_text() == "text"
    pipe, found = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    reader.start()
    output = check_output("it", pipe)
    assert output.is_stream
    output.write("text")
    reader.join(WAIT_S)
    assert found == ["text"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_to_make_is_none_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: a dangling link was found after the weights had been converted."""
    (tmp_path / "link").symlink_to("absent")
    assert run("convert", tmp_path, tmp_path / "link") == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["convert", "nobody/has-this", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err  # before a repository is asked


def test_a_trace_pipe_without_a_reader_is_refused(tmp_path: Path) -> None:
    """Fault: the server waited for a reader before it opened its port."""
    from quire.server.readings.trace_recorder import TraceRecorder

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="nobody reads"):
        TraceRecorder(str(tmp_path / "pipe"))
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    TraceRecorder(str(tmp_path / "pipe")).close()
    os.close(reader)
