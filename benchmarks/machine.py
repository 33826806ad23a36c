"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np

from tq_onnx.runtime.library import library_info


def describe(versions: dict[str, str]) -> dict[str, object]:
    """The processor, the system and what is installed.

    Args:
        versions: of the contenders, by family.
    """
    info = library_info()
    return {
        "cpu": _cpu(),
        "cores": _cores(),
        "isa": info.isa,
        "isa_supported": list(info.isa_supported),
        "system": platform.platform(),
        "pages": "ordinary, MADV_NOHUGEPAGE",
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            **versions,
        },
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    entries: dict[str, str] = {}
    for line in lines:
        name, _, said = line.partition(":")
        entries.setdefault(name.strip(), said.strip())
    family = ", ".join(
        f"{name} {entries[name]}" for name in ("cpu family", "model", "stepping") if name in entries
    )
    return f"{entries.get('model name', platform.machine())} ({family or platform.machine()})"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
