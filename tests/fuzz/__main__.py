"""``python -m tests.fuzz``: see ``tests/fuzz/fuzzing.py``."""

from __future__ import annotations

import sys

import tests.onethread  # noqa: F401 - before whatever imports numpy
from tests.fuzz import fuzzing

if __name__ == "__main__":
    sys.exit(fuzzing.main())
