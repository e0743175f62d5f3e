"""A model's name becomes a folder; a local one without any network code."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import validate_repo_id

from quire.base.errors import ConfigError
from quire.config.hub import local_folder, resolve_model_folder, resolve_tokenizer_folder
from tests.waiting import WAIT_S


def test_local_folder_touches_no_network_code(tmp_path: Path) -> None:
    """Catches a start that hangs on a machine without internet; also pins config's imports."""
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys; from quire.config import resolve_model_folder; "
        f"print(resolve_model_folder({str(tmp_path)!r})); "
        "print(sorted({'torch', 'huggingface_hub', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    assert done.stdout.split("\n")[:2] == [str(tmp_path), "[]"]


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "~/nowhere"])
def test_path_that_does_not_exist(name: str) -> None:
    """Catches a mistyped path looked up on the hub."""
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_model_folder(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("models--Qwen--Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("org/name.git", "org/name"),
        ("Qwen/Qwen3-", "Qwen/Qwen3"),
        ("Qwen/Qwen3-:Q4_K_M", "Qwen/Qwen3"),
        ("https://hub.example/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hub.example/Qwen/Qwen3-0.6B/tree/main", "Qwen/Qwen3-0.6B"),
        ("org/a..b", "organization/name"),
        ("org-/name", "organization/name"),
        ("org/" + "n" * 97, "organization/name"),
    ],
)
def test_names_that_the_hub_cannot_have(name: str, meant: str) -> None:
    """Catches a trace of the hub's client, which refuses them by an error of its own; and a guess
    that it refuses too."""
    for resolve in (
        resolve_model_folder,
        local_folder,
        partial(resolve_tokenizer_folder, model=""),
    ):
        with pytest.raises(ConfigError, match=f"no such folder.*like '{meant}'$"):
            resolve(name)
    validate_repo_id(meant)


@pytest.mark.parametrize("name", ["./m.gguf", "models/m.gguf", "/no/such/m.GGUF", "m.gguf"])
def test_gguf_file_that_does_not_exist(name: str) -> None:
    """Catches a mistyped file looked up on the hub, or called a folder."""
    with pytest.raises(ConfigError, match=r"no such file; give the path of a GGUF file"):
        resolve_model_folder(name)


def test_gguf_file_with_another_ending(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ConfigError, match=r"is a GGUF file; rename it so that it ends in \.gguf"):
        resolve_model_folder(str(file))


def test_folder_without_config(tmp_path: Path) -> None:
    """Catches a wrong folder that is only noticed when reading fails."""
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model_folder(str(tmp_path))


def test_file_instead_of_folder(tmp_path: Path) -> None:
    """Catches a weight file given as the model."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model_folder(str(file))


def hub_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    error = kind.__new__(kind)
    Exception.__init__(error, "detail")
    return error


FAILURES = [
    (hub_error(errors.GatedRepoError), "o/n: the repository is gated.*HF_TOKEN"),
    (hub_error(errors.RevisionNotFoundError), "o/n: no such revision"),
    (hub_error(errors.RepositoryNotFoundError), "o/n: neither a local folder nor"),
    (errors.LocalEntryNotFoundError("no network\nat all"), r"not in the cache.*\(no network\)"),
    (ConnectionError("refused"), r"could not be fetched \(refused\)"),
    (httpx.ProxyError("no proxy"), r"could not be fetched \(no proxy\); check the network"),
    (httpx.InvalidURL("bad port"), r"could not be fetched \(bad port\)"),
    (errors.HFValidationError("bad name"), r"could not be fetched \(bad name\)"),
    (ImportError("no socksio"), r"could not be fetched \(no socksio\)"),
    (RuntimeError("transfer"), r"could not be fetched \(transfer\)"),
]


@pytest.mark.parametrize(("failure", "message"), FAILURES)
def test_hub_failures_are_sentences(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, message: str
) -> None:
    """Catches a stack trace of the hub client as the answer to a mistyped name."""

    def fail(*args: Any, **kwargs: Any) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=message):
        resolve_model_folder("o/n")


def test_hub_download_asks_only_for_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches fetching pickled or duplicate weights next to the safetensors ones, and leaving out
    the file that says how states become vectors."""
    asked: dict[str, Any] = {}

    def download(repo: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model_folder("o/n", revision="v1", download_dir="/d") == tmp_path
    assert (asked["repo"], asked["revision"], asked["cache_dir"]) == ("o/n", "v1", "/d")
    files = ["config.json", "model.safetensors", "tokenizer.model"]
    files += ["chat_template.jinja", "1_Pooling/config.json"]
    left = ["pytorch_model.bin", "original/params.json", "consolidated.safetensors"]
    left += ["onnx/config.json", "onnx/tokenizer.json", "openvino/openvino_config.json"]
    left += ["2_Dense/model.safetensors", "1_Pooling/model.safetensors", "original/a/b.json"]
    kept = huggingface_hub.utils.filter_repo_objects(
        [*files, *left],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(kept) == files


def _repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: list[str]
) -> dict[str, Any]:
    """Files of a repository: the wanted ones come, as the hub's client filters them."""
    asked: dict[str, Any] = {}

    def download(repo: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo=repo)
        kept = huggingface_hub.utils.filter_repo_objects(
            names,
            allow_patterns=kwargs["allow_patterns"],
            ignore_patterns=kwargs["ignore_patterns"],
        )
        for name in kept:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(b"GGUF")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


@pytest.mark.parametrize(
    ("model", "tokenizer", "revision"),
    [("o/n", "o/n", "v1"), ("o/n:Q8_0", "o/n", "v1"), ("o/n", "o/t", None), ("/a/f", "o/t", None)],
)
def test_a_tokenizer_comes_alone(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model: str,
    tokenizer: str,
    revision: str | None,
) -> None:
    """Catches the download of weights that nobody loads, and a revision that only the model's
    repository has."""
    wanted = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    asked = _repository(monkeypatch, tmp_path, [*wanted, "model.safetensors", "m-Q8_0.gguf"])
    assert resolve_tokenizer_folder(tokenizer, model, "v1", "/d") == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == wanted
    assert (asked["repo"], asked["revision"], asked["cache_dir"]) == (tokenizer, revision, "/d")


@pytest.mark.parametrize(
    ("model", "revision"), [("o/n", "v1"), ("o/n:Q4_K_M", "v1"), ("o/t", None), (None, None)]
)
def test_a_tokenizer_in_a_gguf_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str | None, revision: str | None
) -> None:
    """Take the file by its name on the hub, and then by its path."""
    asked = _repository(monkeypatch, tmp_path, GGUF_FILES)
    file = resolve_tokenizer_folder("o/n:Q8_0", model, "v1")
    assert (file, asked["revision"]) == (tmp_path / "model.q8_0.gguf", revision)
    assert resolve_tokenizer_folder(str(file), model, "v1") == file
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_tokenizer_folder("./nowhere", model)


GGUF_FILES = [
    "README.md",
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "mmproj-model-Q8_0.gguf",
    "model.q8_0.gguf",
    "Q6_K/model-Q6_K-00001-of-00002.gguf",
    "Q6_K/model-Q6_K-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("tag", "wanted"),
    [
        ("Q4_K_M", "model-Q4_K_M.gguf"),
        ("q4_k_m", "model-Q4_K_M.gguf"),
        ("Q8_0", "model.q8_0.gguf"),
        ("Q6_K", "Q6_K/model-Q6_K-00001-of-00002.gguf"),
        ("model-Q4_K_S.gguf", "model-Q4_K_S.gguf"),
    ],
)
def test_a_type_names_one_gguf_file_of_a_repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tag: str, wanted: str
) -> None:
    """Catches the download of every type of a model."""
    asked = _repository(monkeypatch, tmp_path, GGUF_FILES)
    assert resolve_model_folder(f"o/n:{tag}", revision="v1") == tmp_path / wanted
    assert (asked["repo"], asked["revision"]) == ("o/n", "v1")
    others = {path.name for path in tmp_path.rglob("*.gguf")} - {Path(wanted).name}
    assert others <= {"model-Q6_K-00002-of-00002.gguf"}


def test_types_that_name_no_file_or_several(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _repository(monkeypatch, tmp_path, [*GGUF_FILES, "other-Q4_K_M.gguf"])
    with pytest.raises(ConfigError, match="o/n:Q2_K: the repository has no GGUF file"):
        resolve_model_folder("o/n:Q2_K")
    with pytest.raises(ConfigError, match=r"several files fit \(model-Q4_K_M\.gguf, other"):
        resolve_model_folder("o/n:Q4_K_M")
