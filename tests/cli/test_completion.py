"""Scripts of shell completion: they offer what the commands take, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from quire.entrypoints.cli.main import COMMANDS, command_parsers, main


def script_of(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


BASH = """
eval "$1"; shift
for line in "$@"; do
  COMP_WORDS=($line); [ "${line% }" = "$line" ] || COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _quire; echo "${COMPREPLY[@]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to run the script")
def test_bash_completes_commands_flags_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {
        "quire ser": "serve",
        "quire ": " ".join(COMMANDS),
        "quire --v": "--version",
        "quire serve --max-model-l": "--max-model-len",
        "quire serve --dtype flo": "float16 float32",
        "quire serve --kv-cache-dtype fp8_": "fp8_e4m3 fp8_e5m2",
        "quire serve --port ": "",
        "quire serve ": "",
        "quire serve --no-quie": "--no-quiet",
        "quire serve -": None,
        "quire bench ": "throughput latency serve",
        "quire bench serve --goodp": "--goodput",
        "quire bench serve --backend openai-": "openai-chat",
        "quire plan --goodp": "",
        "quire serve --enable-expert-p": "",
        "quire completion f": "fish",
    }
    command = ["bash", "--norc", "-c", BASH, "bash", script_of("bash", capsys), *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    found = dict(zip(asked, done.stdout.splitlines(), strict=True))
    assert "--max-num-seqs" in found.pop("quire serve -").split()
    assert found == {line: words for line, words in asked.items() if words is not None}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_has_every_flag_of_every_command(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = script_of(shell, capsys)
    for parser in command_parsers():
        for command in parser.with_subparsers():
            name = command.prog.removeprefix("quire ")
            shown = {flag for flag, _ in command.shown_flags()}
            if shell == "fish":
                seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
                lines = re.findall(rf"-n '{re.escape(seen)}' -([lso]) (\S+)", script)
                found = {("--" if kind == "l" else "-") + flag for kind, flag in lines}
            else:
                [flags] = re.findall(rf'^    "{name}"\) flags="(.*?)"', script, re.MULTILINE)
                found = set(flags.split())
            assert found == shown, name
