"""A front that refuses nobody when it replaces another one, however long it takes to be ready."""

from __future__ import annotations

import sys

from quire.server.processes import front_process

__all__: list[str] = []


def main() -> int:
    front_process.PATIENCE_S = 600.0
    return front_process.main()


if __name__ == "__main__":
    sys.exit(main())
