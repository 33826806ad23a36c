"""``python -m tests.fuzz``: see ``tests/fuzz/fuzzing.py``."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Fuzzes with processes of one thread each, which numpy reads when it is imported."""
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    from tests.fuzz import fuzzing

    return fuzzing.main()


if __name__ == "__main__":
    sys.exit(main())
