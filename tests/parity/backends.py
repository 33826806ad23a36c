"""Everything that executes the operators, under one call.

Kernels take products of floats, which leave small faults no room; those of 8 bits are tested in
C++ and in tests/verification/test_oracle.py.

``body`` is the function body in ONNX Runtime without the library, ``evaluator`` the same body in
the onnx reference evaluator, ``scalar``, ``avx2``... the kernels at one SIMD level, which the
session is proven to run.

Tests run the body and the best level of this machine: custom_ops/tests holds every level to the
bytes of the scalar one (test_encode.cpp, test_search.cpp, test_digest.cpp, test_window.cpp,
test_random.cpp) and its attention to float64 (attention_problem.h, by test_attention.cpp,
test_paged.cpp and test_random.cpp), codec by codec.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from tq_onnx.errors import LibraryError
from tq_onnx.runtime.session import make_session, placement

ISA = "TQ_ONNX_ISA"
PRODUCTS = "TQ_ONNX_PRODUCTS"


def _levels() -> tuple[str, ...]:
    from tq_onnx.runtime.library import library_info

    try:
        levels = library_info().isa_supported
    except LibraryError:
        return ("scalar",)  # whose tests then fail with the library's own sentence
    # avxvnni is avx2 but for its products of 8 bits.
    return tuple(level for level in levels if level != "avxvnni")


LEVELS = tuple(dict.fromkeys((_levels()[0], _levels()[-1])))
"""The best one and the scalar one."""
BEST = LEVELS[0]
BODIES = ("body", "evaluator")
BACKENDS = ("body", BEST)


@cache
def session(backend: str, model: bytes, threads: int = 2) -> onnxruntime.InferenceSession:
    """An ONNX Runtime session; the level of a kernel is chosen when the kernel is created."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ISA, raising=False)
        patch.setenv(PRODUCTS, "float")
        if backend not in BODIES:
            patch.setenv(ISA, backend)
        opened = make_session(model, library=backend not in BODIES, threads=threads)
    assert placement(opened).uses_library == (backend not in BODIES)
    return opened


@cache
def _evaluator(model: bytes) -> ReferenceEvaluator:
    return ReferenceEvaluator(onnx.load_from_string(model))


def run(backend: str, model: bytes, feeds: dict[str, np.ndarray]) -> list[Any]:
    """The outputs of a model, in graph order."""
    if backend == "evaluator":
        return _evaluator(model).run(None, feeds)
    return session(backend, model).run(None, feeds)
