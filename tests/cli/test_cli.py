"""The command line as users meet it: a process, its status, its two streams."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire import __version__
from quire.entrypoints.cli import run_batch, serve
from quire.entrypoints.cli.flags.engine import given_settings
from quire.entrypoints.cli.flags.foreign import flag_advice
from quire.entrypoints.cli.main import COMMANDS, main
from quire.entrypoints.cli.parser import CommandParser
from tests.client.scripted_server import Script, serve_script
from tests.waiting import WAIT_S

QWEN = str(Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-0.6b")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from quire.entrypoints.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    """An import that stopped being lazy costs every call of the program seconds."""
    code = (
        "import sys\n"
        "from quire.entrypoints.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'jinja2', 'fastapi', 'yaml', 'quire.config'}\n"
        "sys.exit(', '.join(heavy & sys.modules.keys()) or 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_loads_no_torch(command: str) -> None:
    """Whoever looks for a flag should not wait for what they do not use."""
    found = _helps()
    assert command in found, "the help of a command before it fails, or loads too much"
    loaded, text = found[command]
    assert not loaded and "--help" in text


@functools.cache
def _helps() -> dict[str, tuple[list[str], str]]:
    """Return what is loaded after the help of each command, and the help, up to the first that
    fails or loads too much. One process shows all, as they mostly import the same."""
    code = (
        "import contextlib, io, json, sys\n"
        "from quire.entrypoints.cli.main import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as shown:\n"
        "        try:\n            main([name, '--help'])\n"
        "        except SystemExit as end:\n            assert end.code == 0\n"
        "    loaded = sorted({'torch', 'transformers'} & sys.modules.keys())\n"
        "    print(json.dumps([name, loaded, shown.getvalue()]))\n"
        "    if loaded:\n        break\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (loaded, text) for name, loaded, text in lines}


def test_help_of_serve_loads_no_web_framework() -> None:
    """FastAPI and numpy would take it most of a second."""
    code = (
        "import sys\n"
        "from quire.entrypoints.cli.main import main\n"
        "try:\n    main(['serve', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "sys.exit(', '.join({'fastapi', 'uvicorn', 'numpy', 'zmq'} & sys.modules.keys()) or 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_plan_loads_no_torch() -> None:
    """A plan is for looking before the machine is touched."""
    code = (
        "import sys; from quire.entrypoints.cli.main import main\n"
        f"status = main(['plan', {QWEN!r}, '--load-format', 'dummy', '--max-model-len', '64'])\n"
        "sys.exit(status or 'torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "474.0 M parameters" in result.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"quire {__version__}\n"


def test_no_command_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """A script that lost its argument must not look successful."""
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().out


def test_errors_are_one_line_and_status_2() -> None:
    """A traceback hides the sentence that helps."""
    result = run("plan", "/nowhere/at/all")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("quire: error: ")
    assert result.stderr.count("\n") == 1
    assert "/nowhere/at/all" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan", "--max-model-ln", "3"], "did you mean --max-model-len?"),
        (["serve", "--max-num-sequences", "3"], "did you mean --max-num-seqs?"),
        (["bench", "latency", "--batch-sise", "3"], "did you mean --batch-size?"),
        (["bench", "latency", "--batch-size", "0"], "must be at least 1"),
        (["bench"], "required: {throughput,latency,serve} (see quire bench --help)"),
        (["serve", "a", "b"], "one argument too many: b (see quire serve --help)"),
        (["bench", "latency", "a", "b"], "too many: b (see quire bench latency --help)"),
        (["nonsense"], "no such command: nonsense; it is one of serve, chat, "),
        (["plan", "--depth", "few"], "invalid int value: 'few'"),
    ],
)
def test_wrong_arguments_end_with_status_2_and_help_on_the_nearest(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: error: ")
    assert sentence in error


def test_values_are_checked_by_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--dtype", "int3"]) == 2
    assert "Setting dtype cannot be 'int3'" in capsys.readouterr().err
    assert main(["plan", "--max-num-seqs", "few"]) == 2
    assert "Setting max_num_seqs cannot be 'few'" in capsys.readouterr().err
    assert main(["bench", "throughput", "--input-len", "9-3"]) == 2
    assert "'9-3' is neither a number nor a range" in capsys.readouterr().err
    assert main(["bench", "throughput", "--dataset-name", "alpaca", "--input-len", "3"]) == 2
    assert "lengths of its own" in capsys.readouterr().err


def test_plan_as_json_with_the_flags_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    """Known command lines keep working: aliases count, what is not needed is said and ignored."""
    arguments = [
        "plan", "--model", QWEN, "--load-format", "dummy", "--max-model-len", "1k",
        "--kv-cache-memory-bytes", "256MiB", "--no-enable-prefix-caching", "--trust-remote-code",
        "--tokenizer-mode", "auto", "--json",
    ]  # fmt: skip
    assert main(arguments) == 0
    shown = capsys.readouterr()
    plan = json.loads(shown.out)
    assert plan["settings"]["max_model_len"] == 1000
    assert plan["settings"]["enable_prefix_caching"] is False
    assert plan["memory"]["kv_cache"] <= 256 * 2**20
    assert plan["num_parameters"] == 474_021_888
    assert "--trust-remote-code is not needed" in shown.err
    assert "--tokenizer-mode is not needed" in shown.err


def test_the_model_is_named_once_or_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name it is the bundled one."""
    assert main(["plan"]) == 0
    assert "5.5 M parameters" in capsys.readouterr().out
    assert main(["plan", QWEN, "--model", QWEN]) == 2
    assert "twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("serve -c 1024", "-c; --max-model-len does it here"),
        ("serve -t 2", "-t; --num-threads does it here"),
        ("plan -d 2", "no such flag: -d; flags have two dashes and whole names here"),
        ("serve -p 9000", "-p; `quire chat --quick` does it; --port is the port"),
        ("serve -m a.gguf", "-m; --model does it here"),
        ("convert -m a.gguf out", "-m; `quire serve --model` does it"),
        ("serve -hf a/b", "-hf; --model does it here"),
        ("serve -ngl=99", "-ngl; the model is on one device as a whole, which --device names"),
        ("chat --n-gpu-layers 9", "--n-gpu-layers; the model is on one device"),
        ("serve --ctx-size=4096", "--ctx-size; --max-model-len does it here"),
        ("chat -n 20", "-n; --max-tokens does it here"),
        ("plan --host 0.0.0.0", "--host; `quire serve --host` does it"),
        ("chat --host localhost", "--host; --url does it here"),
        ("run-batch -i a -ot b", "no such flag: -ot"),
        ("run-batch -input-file a", "no such flag: -input-file; did you mean --input-file?"),
        ("chat -hi", "no such flag: -hi"),
        ("serve --ollama-thing", "no such flag: --ollama-thing"),
        ("-m a.gguf", "no such flag: -m; begin with a command, such as `quire serve a.gguf`"),
        ("run llama3", "no such command: run; `quire chat MODEL` does it here"),
        ("pull llama3", "no such command: pull; a model is fetched when it is first named"),
        ("list", "no such command: list; "),
        ("collect-env", "no such command: collect-env; `quire doctor` does it here"),
        ("server", "no such command: server; `quire serve MODEL` does it here"),
        ("benhc serve", "no such command: benhc; did you mean bench?"),
    ],
)  # fmt: skip
def test_a_foreign_flag_or_command_names_what_does_it_here(
    given: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: short flags were read as the beginning of others: -t started two ranks."""
    with pytest.raises(SystemExit) as ended:
        main(given.split())
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_one_letter_flag_takes_its_value_joined_to_it() -> None:
    parser = CommandParser(prog="quire run-batch")
    run_batch.add_arguments(parser)
    options = parser.parse_args(["-ia.jsonl", "-o=b.jsonl", "-tp", "2"])
    assert (options.input_file, options.output_file) == ("a.jsonl", "b.jsonl")
    assert given_settings(options) == {"tensor_parallel_size": 2}


def test_the_page_for_users_of_llama_cpp_says_what_the_refusals_say() -> None:
    """Each flag in the page's table that is none of ours has its advice, and it is the page's."""
    page = (Path(__file__).parents[2] / "docs" / "from-llama-cpp.md").read_text()
    parser = CommandParser(prog="quire serve")
    serve.add_arguments(parser)
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", page.split("## Requests")[0], re.MULTILINE)
    named = [
        (flag, said)
        for theirs, said in rows
        for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", theirs)
        if not parser.has_flag(flag)
    ]
    assert len(named) > 10
    for flag, said in named:
        advice = flag_advice(flag, parser)
        assert advice is not None, flag
        ours = re.match(r"--[\w-]+", advice)
        assert ours is None or ours[0] in said or ours[0] == "--model", (flag, advice, said)


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_closed_input_is_an_empty_one(command: str) -> None:
    """Fault: a traceback."""
    code = "import sys; from quire.entrypoints.cli.main import main; sys.exit(main())"
    shell = 'exec "$0" -c "$1" "$2" --url "$3" <&-'
    with serve_script(Script()) as url:
        asked = ["sh", "-c", shell, sys.executable, code, command, url]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "Traceback" not in done.stderr
