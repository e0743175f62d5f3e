"""Flags from the command line, the environment and a file, and which of them wins."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.entrypoints.cli import chat, plan, serve
from quire.entrypoints.cli.flags.engine import read_settings
from quire.entrypoints.cli.flags.server import read_server_settings
from quire.entrypoints.cli.main import main
from quire.entrypoints.cli.parser import CommandParser
from tests.client.scripted_server import Script, serve_script

KEYS = ("a" * 16, "b" * 16)


def parse(*arguments: str) -> argparse.Namespace:
    parser = CommandParser(prog="quire serve")
    serve.add_arguments(parser)
    return parser.parse_args(arguments)


def config(folder: Path, text: str) -> str:
    file = folder / "serve.yaml"
    file.write_text(text)
    return str(file)


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config(tmp_path, "\ufeffport: 9001\nhost: localhost\nmax-queue-s: 3\n")
    monkeypatch.setenv("QUIRE_PORT", "9002")
    monkeypatch.setenv("QUIRE_MAX_QUEUE_S", "4")
    found = read_server_settings(parse("--config", file, "--max-queue-s=5"))
    assert (found.port, found.host, found.limits.max_queue_s) == (9002, "localhost", 5.0)


def test_every_kind_of_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers with units, switches both ways, several values, and the names of vLLM."""
    file = config(
        tmp_path,
        f"api_key: [{KEYS[0]}, {KEYS[1]}]\n--max-model-len: 4k\nno-enable-prefix-caching: true\n"
        "gpu-memory-utilization: 0.5\nenable-log-requests: true\nquiet: false\nuds:\n",
    )
    monkeypatch.setenv("QUIRE_SERVED_MODEL_NAME", "one, two")
    monkeypatch.setenv("QUIRE_DISABLE_LOG_STATS", "yes")
    monkeypatch.setenv("QUIRE_SEED", "")
    options = parse("--config", file)
    server, engine = read_server_settings(options), read_settings(options)
    assert server.api_key == KEYS
    assert server.served_model_name == ("one", "two")
    assert server.disable_log_stats
    assert server.enable_log_requests
    assert server.uds is None
    assert engine.max_model_len == 4000
    assert engine.memory_utilization == 0.5
    assert not engine.enable_prefix_caching
    assert not engine.quiet
    assert engine.seed == 0


def test_several_values_on_the_command_line_replace_those_of_the_file(tmp_path: Path) -> None:
    """A key that was taken back must not stay valid because a file still names it."""
    file = config(tmp_path, f"api-key: [{KEYS[0]}]\n")
    assert read_server_settings(parse("--config", file, "--api-key", KEYS[1])).api_key == KEYS[1:]


def test_a_flag_that_repeats_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_server_settings(parse("--pin-prefix", "a.txt", "--pin-prefix", "b", "c.json"))
    assert found.pin_prefix == ("a.txt", "b", "c.json")
    file = config(tmp_path, "pin-prefix: [d, e]\n")
    assert read_server_settings(parse("--config", file)).pin_prefix == ("d", "e")
    monkeypatch.setenv("QUIRE_PIN_PREFIX", "f.txt,g.txt")
    assert read_server_settings(parse("--config", file)).pin_prefix == ("f.txt", "g.txt")
    assert read_server_settings(parse("--pin-prefix", "h")).pin_prefix == ("h",)


def test_the_key_variable_of_vllm_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment that sets it must not become open to all; quire's own variable wins."""
    monkeypatch.setenv("VLLM_API_KEY", KEYS[0])
    assert read_server_settings(parse()).api_key == KEYS[:1]
    monkeypatch.setenv("QUIRE_API_KEY", KEYS[1])
    assert read_server_settings(parse()).api_key == KEYS[1:]


@pytest.mark.parametrize("value", ["", " ", ",", f"{KEYS[0]},", f"{KEYS[0]},,{KEYS[1]}"])
@pytest.mark.parametrize("variable", ["QUIRE_API_KEY", "VLLM_API_KEY"])
def test_a_key_variable_without_a_key_is_refused(
    variable: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A secret that was not filled in must not leave the server open, as `--api-key ""` does not;
    other empty variables count as unset."""
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("QUIRE_PORT", "")
    with pytest.raises(SystemExit):
        parse()
    said = capsys.readouterr().err
    assert f"the variable {variable} " in said and KEYS[0] not in said
    assert read_server_settings(parse("--api-key", KEYS[0])).api_key == KEYS[:1]


@pytest.mark.parametrize("value", ['""', "[]", '[""]', f'["{KEYS[0]}", ""]', '","', "", "~"])
def test_a_key_of_a_file_that_is_none_is_refused(
    tmp_path: Path, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(tmp_path, f"port: 9001\napi-key: {value}\n")
    with pytest.raises(SystemExit):
        parse("--config", file)
    said = capsys.readouterr().err
    assert f"api-key in {file} " in said and KEYS[0] not in said


def test_for_a_client_an_empty_key_variable_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "")
    parser = CommandParser(prog="quire chat")
    chat.add_arguments(parser)
    assert parser.parse_args([]).api_key is None


def test_a_model_by_position_wins_over_one_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be named twice otherwise."""
    monkeypatch.setenv("QUIRE_MODEL", "/from/the/environment")
    assert read_settings(parse("/here")).model == "/here"
    assert read_settings(parse("--model", "/here")).model == "/here"
    assert read_settings(parse()).model == "/from/the/environment"


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("QUIRE_PORT", "many", "variable QUIRE_PORT cannot be 'many': invalid int value"),
        ("QUIRE_PORT", "tcp://10.0.0.1:80", "Kubernetes sets it"),
        ("QUIRE_DTYPE", "int3", "Setting dtype cannot be 'int3'"),
        ("QUIRE_ENABLE_PREFIX_CACHING", "maybe", "give true or false"),
        ("QUIRE_PIPELINE_PARALLEL_SIZE", "2", "--pipeline-parallel-size 2 cannot be served"),
    ],
)
def test_a_bad_value_of_a_variable_is_told(
    variable: str,
    value: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    try:
        assert main(["serve"]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("prot: 3", "no such flag in {file}: --prot; did you mean --port?"),
        ("port: [1, 2]", "port in {file} cannot be [1, 2]: give one value"),
        ("config: other.yaml", "no such flag in {file}: --config"),
        ("help: true", "no such flag in {file}: --help"),
    ],
)
def test_a_bad_line_of_the_file_is_told(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt key would silently keep a default."""
    file = config(tmp_path, text)
    with pytest.raises(SystemExit) as ended:
        parse("--config", file)
    assert ended.value.code == 2
    assert sentence.format(file=file) in capsys.readouterr().err


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "port", "a: b: c\n", "1: 2\n"])
def test_a_file_that_is_no_list_of_flags(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one `flag: value` a line"):
        parse("--config", config(tmp_path, text))


def test_an_empty_file_sets_nothing_and_a_missing_one_is_told(tmp_path: Path) -> None:
    assert read_server_settings(parse("--config", config(tmp_path, ""))).port == 8000
    with pytest.raises(ConfigError, match="cannot be read"):
        parse("--config", str(tmp_path / "none.yaml"))


def test_flags_that_vllm_users_know(capsys: pytest.CaptureFixture[str]) -> None:
    """A command line that is known by heart starts; what is not needed is said."""
    options = parse(
        "some/model", "-q", "int8", "-tp", "1", "-O3", "--trust-remote-code", "--enforce-eager",
        "--swap-space", "4", "--gpu-memory-utilization", "0.9", "--max-model-len", "2048",
        "--disable-log-requests", "--enable-chunked-prefill", "--uvicorn-log-level", "warning",
        "--disable-uvicorn-access-log", "--runner", "generate", "--enable-prompt-tokens-details",
        "--device", "cpu", "--max-log-len", "5", "--no-enable-lora", "--no-trust-remote-code",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
    )  # fmt: skip
    settings = read_settings(options)
    assert (settings.model, settings.max_model_len) == ("some/model", 2048)
    assert settings.quantization == "int8"
    assert settings.swap_space == 4 * 2**30
    assert settings.device == "cpu"
    server = read_server_settings(options)
    assert server.disable_access_log
    assert (server.tool_call_parser, server.reasoning_parser) == ("hermes", "qwen3")
    assert settings.tensor_parallel_size == 1
    notes = capsys.readouterr().err
    for flag in (
        "disable-log-requests", "runner", "max-log-len",
        "no-trust-remote-code", "enable-chunked-prefill",
        "enable-auto-tool-choice",
    ):  # fmt: skip
        assert f"--{flag} is not needed: " in notes


@pytest.mark.parametrize(
    "arguments",
    [
        ("-pp", "2"),
        ("--pipeline-parallel-size", "2"),
        ("--speculative-model", "small"),
        ("--guided-decoding-backend", "xgrammar"),
    ],
)
def test_what_is_missing_is_refused_and_not_ignored(arguments: tuple[str, ...]) -> None:
    """Serving without what was asked for looks like success."""
    with pytest.raises(ConfigError, match="cannot be served"):
        read_settings(parse("model", *arguments))


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--no-enable-chunked-prefill", "long prompts are always computed in chunks"),
        ("--no-async-scheduling", "set depth to 1"),
        ("--no-enable-tokenizer-info-endpoint", "it is always there"),
    ],
)
def test_what_cannot_be_turned_off_is_refused(flag: str, sentence: str) -> None:
    """To start as if the opposite had been asked for looks like success."""
    with pytest.raises(ConfigError, match=f"{flag} cannot be served: .*{sentence}"):
        read_settings(parse("model", flag))


def test_a_variable_cannot_turn_it_off_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENABLE_CHUNKED_PREFILL", "false")
    with pytest.raises(ConfigError, match="--no-enable-chunked-prefill cannot be served"):
        read_settings(parse("model"))


def test_help_shows_each_flag_once_and_no_foreign_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert text.count("--max-model-len ") == 1
    assert "QUIRE_FLAG_NAME" in text
    assert "--pipeline-parallel-size" not in text


def test_errors_of_the_file_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "/no/such/file.yaml"]) == 2
    assert capsys.readouterr().err.startswith("quire: error: The file of --config cannot be read")


def test_a_plan_reads_the_file_of_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red when a plan is made for other settings than the server of the same file has."""
    file = config(tmp_path, "port: 9001\nmax-queue-s: 3\nmax_model_len: 256\ntool-call-parser: x\n")
    parser = CommandParser(prog="quire plan")
    plan.add_arguments(parser)
    assert read_settings(parser.parse_args(["--config", file])).max_model_len == 256
    assert read_settings(parser.parse_args(["--config", file, "--max-model-len", "128"])) == (
        read_settings(parser.parse_args(["--max-model-len=128"]))
    )
    for key, near in {"prot": "--port", "max-model-leng": "--max-model-len"}.items():
        with pytest.raises(SystemExit) as caught:
            parser.parse_args(["--config", config(tmp_path, f"{key}: 1\n")])
        assert caught.value.code == 2
        said = capsys.readouterr().err
        assert f"--{key}; did you mean {near}?" in said
    assert main(["plan", "--config", config(tmp_path, "port: 1\nkv-cache-dtype: int8\n")]) == 0
    assert "int8" in capsys.readouterr().out


@pytest.fixture
def defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the user's own file, which a test writes."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home" / "quire.yaml"


def test_the_users_file_comes_last(
    tmp_path: Path, defaults: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults.write_text(
        "\ufeffport: 1\nhost: a\nroot-path: b\nmax-queue-s: 4\ntemperature: 0.5\n"
        "serve:\n  max-queue-s: 5\n  uds: c\nchat:\n  uds: not read here\n",
        encoding="utf-8",
    )
    file = config(tmp_path, "port: 2\nhost: localhost\n")
    monkeypatch.setenv("QUIRE_PORT", "3")
    found = read_server_settings(parse("--config", file, "--root-path", "/d"))
    assert (found.port, found.host, found.root_path) == (3, "localhost", "/d")
    assert (found.limits.max_queue_s, found.uds) == (5.0, "c"), "a command's section comes first"
    assert read_server_settings(parse("--config", file, "--port", "4")).port == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: [", "{} is not YAML"),
        ("- port", "{} is not a list of flags"),
        ("depth: few", "depth in {} cannot be 'few'"),
        ("serve: 3", "serve in {} is 3. Write its flags below it"),
    ],
)
def test_a_broken_users_file_is_named(
    text: str, words: str, defaults: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults.write_text(text)
    with contextlib.suppress(SystemExit):
        assert main(["plan"]) == 2
    assert words.format(defaults) in capsys.readouterr().err


def test_a_users_file_that_cannot_be_looked_for_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: every command ended with a traceback."""
    monkeypatch.setenv("XDG_CONFIG_HOME", "/" + "x" * 300)  # as in a folder that may not be read
    assert read_server_settings(parse()).port == 8000


def test_a_plan_says_where_values_come_from(
    tmp_path: Path,
    defaults: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    defaults.write_text("block-size: 32\nnum-threads: 1\nblok-size: 3\nport: 3\nseed: 4\n")
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "64")
    file = config(tmp_path, "max-num-seqs: 3\n")
    assert main(["plan", "--config", file, "--num-threads", "2"]) == 0
    shown = capsys.readouterr()
    rows = dict(re.findall(r"^  (\w+) +(\S+ .+)$", shown.out.split("given elsewhere")[1], re.M))
    assert rows == {
        "max_model_len": "the variable QUIRE_MAX_MODEL_LEN",
        "max_num_seqs": f"max-num-seqs in {file}",
        "block_size": f"block-size in {defaults}",
        "seed": f"seed in {defaults}",
    }
    assert f"blok-size in {defaults} sets nothing; did you mean block-size?" in shown.err
    assert shown.err.count("sets nothing") == 1, "port is another command's"
    assert main(["plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sources"]["num_threads"].endswith(str(defaults))
    monkeypatch.delenv("QUIRE_MAX_MODEL_LEN")
    defaults.unlink()
    assert main(["plan", "--max-model-len", "64"]) == 0
    assert "given elsewhere" not in capsys.readouterr().out


def test_the_users_defaults_of_an_engine_start_none(
    defaults: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chat asks the server that is there, whatever model the file names for servers."""
    defaults.write_text("model: /no/such/model\nmax-model-len: 64\ntemperature: 0.25\n")
    script = Script()
    with serve_script(script) as url:
        assert main(["chat", "-q", "Hi", "--url", url]) == 0
        assert script.seen[-1][1]["temperature"] == 0.25
        defaults.write_text(f"url: {url}\n")
        assert main(["chat", "-q", "Hi"]) == 0
        assert main(["chat", "-q", "Hi", "/no/such/model"]) == 2
    assert "/no/such/model: no such folder" in capsys.readouterr().err
