"""The example of a package that adds a model family: installed as its users install it, and run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.families import Case, write_checkpoint

ROOT = Path(__file__).parents[2]
CASE = Case(
    "ernie",
    "ernie4_5",
    {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    },
)

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Python with the installed package beside quire, in a process of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "examples" / "custom_model", source, dirs_exist_ok=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    path = os.pathsep.join([str(target), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path}

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )

    return call


BIASES = (False, True)
CHECK = (
    "import sys\n"
    "from quire.entrypoints.cli.main import main\n"
    "for folder in sys.argv[1:]:\n"
    "    if status := main(['check-model', folder, '--num-tokens', '40', '--json']):\n"
    "        sys.exit(status)\n"
    "    print('end')\n"
)


def test_logits_equal_those_of_transformers(run: Run, tmp_path: Path) -> None:
    """Turns red when an entry point is not asked, or the model of the example is wrong. One process
    checks a model with biases and one without, as it takes seconds to import `transformers`."""
    folders = [tmp_path / str(use_bias) for use_bias in BIASES]
    for folder, use_bias in zip(folders, BIASES, strict=True):
        extra = {**CASE.extra, "use_bias": use_bias}
        write_checkpoint(Case("ernie", "ernie4_5", extra), folder)
    ended = run("-c", CHECK, *map(str, folders))
    assert ended.returncode == 0, ended.stderr
    *reports, rest = ended.stdout.split("\nend\n")
    assert len(reports) == len(BIASES) and not rest
    for report in map(json.loads, reports):
        assert report["architecture"] == "Ernie4_5ForCausalLM"
    assert "generic" not in ended.stderr


def test_an_engine_runs_it(run: Run, tmp_path: Path) -> None:
    """Turns red when a process of the engine does not find the package."""
    write_checkpoint(CASE, tmp_path)
    code = (
        "from quire import LLM, SamplingParams\n"
        f"llm = LLM({str(tmp_path)!r}, skip_tokenizer_init=True, quiet=True, "
        "model_impl='quire', quantization='int8')\n"
        "prompts = [{'prompt_token_ids': list(range(3, 40))}] * 2\n"
        "params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)\n"
        "outputs = llm.generate(prompts, params, use_tqdm=False)\n"
        "ids = [list(output.outputs[0].token_ids) for output in outputs]\n"
        "print(len(ids[0]), ids[0] == ids[1])\n"
    )
    ended = run("-c", code)
    assert ended.stdout == "9 True\n", ended.stderr


def test_a_value_that_it_does_not_compute_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    write_checkpoint(CASE, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "mish"}))
    ended = run("-m", "quire", "plan", str(tmp_path))
    assert ended.returncode == 2
    assert "hidden_act='mish' is not supported" in ended.stderr
