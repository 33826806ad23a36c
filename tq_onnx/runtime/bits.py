"""Name all that decides about the bits that a session computes, beside its model and its inputs."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

import onnxruntime

from tq_onnx.runtime.library import library_info
from tq_onnx.runtime.session import placement
from tq_onnx.runtime.variables import SKIP_BELOW

_PROCESSORS: Final = Path("/proc/cpuinfo")
_FACTS: Final = ("model name", "flags", "CPU part", "Features")
"""Of a processor, in Linux on x86 and on ARM: ONNX Runtime chooses kernels by them."""


def bits_of(session: onnxruntime.InferenceSession) -> tuple[object, ...]:
    """Return versions, kernels, threads and processor of a session.

    Two sessions of one model for which they are the same compute the same bits from the same calls.
    """
    place = placement(session)
    library: tuple[object, ...] = ()
    if place.uses_library:
        info = library_info()
        status = info.path.stat()
        library = (info.version, status.st_size, status.st_mtime_ns, info.isa, info.products)
    return (
        onnxruntime.__version__,
        place.providers,
        session.get_session_options().intra_op_num_threads,
        os.cpu_count(),
        library,
        os.environ.get(SKIP_BELOW.name),
        platform.machine(),
        _processor(),
    )


def _processor() -> tuple[str, ...]:
    try:
        lines = _PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return (platform.processor(),)
    return tuple(sorted({line for line in lines if line.startswith(_FACTS)}))
