"""`python -m quire`, whose cores compute with no torch. Run as a script by `test_streams.py`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of this file's folder

from quire.engine.supervision.supervisor import EngineSupervisor  # noqa: E402
from quire.entrypoints.cli.main import main as cli  # noqa: E402

CORE_COMMAND = (sys.executable, str(ROOT / "tests/engine/fake_core_process.py"), "{}")


def main() -> int:
    options = EngineSupervisor.__init__.__kwdefaults__
    assert options is not None, "it takes options by name"
    options["command"] = CORE_COMMAND
    return cli()


if __name__ == "__main__":
    sys.exit(main())
