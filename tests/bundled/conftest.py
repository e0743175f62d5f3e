"""Makes the scripts in tools/bundled_model importable, as they are when run from the root."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "tools" / "bundled_model"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a script by name; afterwards none of the scripts stays in `sys.modules`."""
    names = {path.stem for path in SCRIPTS.glob("*.py")}
    shadowed = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(shadowed)
