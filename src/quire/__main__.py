"""`python -m quire`, the same as `quire`."""

import sys

from quire.entrypoints.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
