"""Names of KV blocks: equal wherever K/V are, and nowhere else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.base.platform import detect_platform
from quire.bundled import bundled_model_path
from quire.config.settings import EngineSettings
from quire.config.startup import plan_startup
from quire.engine.build import block_hasher
from quire.protocol.control import Report

SECRET = "a secret of all engines"
TOKENS = np.arange(64, dtype=np.int32)


def names(folder: Path, family: str = "cpu_avx2", **settings: Any) -> list[bytes]:
    asked = EngineSettings(model=str(folder), kv_cache_memory=2**24, **settings)
    hasher = block_hasher(plan_startup(asked, detect_platform()), Report(kernel_family=family))
    found: list[bytes] = []
    hasher.extend(found, TOKENS, hasher.root())
    return found


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two copies of one model."""
    copies = tmp_path / "one", tmp_path / "two"
    for each in copies:
        shutil.copytree(bundled_model_path(), each)
    return copies


def test_one_model_has_one_set_of_names_in_all_folders(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: replicas with the model in different places share nothing."""
    monkeypatch.setenv("QUIRE_BLOCK_NAME_SECRET", SECRET)
    one, two = folders
    assert names(one) == names(two) == names(one, generation_config="none", max_num_seqs=3)
    monkeypatch.setenv("QUIRE_BLOCK_NAME_SECRET", SECRET + "!")
    assert names(one) != names(two, family="other")
    monkeypatch.delenv("QUIRE_BLOCK_NAME_SECRET")
    assert names(one) != names(one), "a secret that anyone may know"


def test_whatever_changes_keys_and_values_changes_names(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a changed model, dtype, format or kernel hits blocks of the old one."""
    monkeypatch.setenv("QUIRE_BLOCK_NAME_SECRET", SECRET)
    one, two = folders
    weights = two / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-10] ^= 1
    weights.write_bytes(data)
    changed_config = two.with_name("three")
    shutil.copytree(one, changed_config)
    config = json.loads((changed_config / "config.json").read_text())
    config["rms_norm_eps"] = 1e-4
    (changed_config / "config.json").write_text(json.dumps(config))
    variants = [
        names(one),
        names(one, family="cpu_avx512"),
        names(one, dtype="float32"),
        names(one, kv_cache_dtype="int8"),
        names(one, quantization="int8"),
        names(one, quantization="int8", activation_bits=16),
        names(one, block_size=32),
        names(one, load_format="dummy"),
        names(one, load_format="dummy", seed=1),
        names(two),
        names(changed_config),
    ]
    firsts = [found[0] for found in variants]
    assert len(set(firsts)) == len(firsts)


def test_a_secret_that_can_be_guessed_is_refused(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_BLOCK_NAME_SECRET", "short")
    with pytest.raises(ConfigError, match=r"QUIRE_BLOCK_NAME_SECRET has 5 characters"):
        names(folders[0])
