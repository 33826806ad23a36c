"""Starts the command line as a process that Ctrl-C reaches."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any


def start(*arguments: object, **options: Any) -> subprocess.Popen[Any]:
    """Starts ``tq-onnx ARGUMENTS``; options are those of ``Popen``.

    Background jobs of a shell, as in CI, ignore SIGINT, and hand that down.
    """
    words = [sys.executable, "-m", "tq_onnx.cli.main", *map(str, arguments)]
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return subprocess.Popen(words, **options)
    finally:
        signal.signal(signal.SIGINT, before)
