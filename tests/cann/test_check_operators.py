"""The script for the owner of a card, on the simulated device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "custom_ops" / "cann" / "testing" / "check_operators.py"

pytestmark = pytest.mark.cann


def test_all_checks_hold(kernels_named: None) -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "all checks hold", done.stdout + done.stderr
    assert done.returncode == 0
    assert done.stdout.count("yes ") > 50


def test_a_missing_kernel_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TQ_ONNX_CANN_KERNELS", str(tmp_path / "absent.so"))
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "absent.so" in done.stdout
