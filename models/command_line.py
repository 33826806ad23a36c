"""Exporters that are commands: how the recipes run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: Checkpoints are folders here: nothing is fetched, and no exporter looks for a GPU.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run_module(module: str, *arguments: str, folder: Path | None = None) -> None:
    """Run ``python -m module arguments`` in this environment, quietly, in ``folder`` if given.

    Raises:
        RuntimeError: it failed; the message ends with what it printed.
    """
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        raise RuntimeError(f"{module} exited with {process.returncode}:\n{process.stdout[-4000:]}")
