"""Imported before numpy, which reads these variables once: a machine has a worker per processor.

Threads of BLAS that wait for small products spin, and take the processor from the other worker.
"""

from __future__ import annotations

import os

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
