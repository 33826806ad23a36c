"""How small ONNX models run in ONNX Runtime with their caches in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from contender import Array, plain_pages


@dataclass(frozen=True)
class OnnxStep:
    """A model, its inputs and its caches.

    Attributes:
        model: the serialised model; its outputs are ``output`` and the caches.
        inputs: what is the same for all copies of the caches.
        caches: input name to (output name, content).
        output: shape and type of ``output``.
    """

    model: bytes
    inputs: Mapping[str, Array]
    caches: Mapping[str, tuple[str, Array]]
    output: tuple[tuple[int, ...], np.dtype[np.generic]]


class OrtPrepared:
    """A session with copies of the caches, each bound as past and present."""

    def __init__(self, step: OnnxStep, threads: int, copies: int, library: str = "") -> None:
        """Opens the session; it keeps ONNX Runtime's defaults but for the threads.

        Args:
            step: what runs; its own caches are the first copy.
            threads: ``intra_op_num_threads``.
            copies: of the caches.
            library: custom operators.
        """
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if library:
            options.register_custom_ops_library(library)
        self._session = ort.InferenceSession(
            step.model, options, providers=["CPUExecutionProvider"]
        )
        self._alive: list[Array] = list(step.inputs.values())
        output = plain_pages(*step.output)
        self._alive.append(output)
        self._bindings = []
        self.caches: list[list[Array]] = []
        for copy in range(copies):
            binding = self._session.io_binding()
            for name, array in step.inputs.items():
                _bind(binding.bind_input, name, array)
            self.caches.append([])
            for name, (present, content) in step.caches.items():
                cache = content
                if copy:
                    cache = plain_pages(content.shape, content.dtype)
                    cache[...] = content
                self.caches[-1].append(cache)
                _bind(binding.bind_input, name, cache)
                _bind(binding.bind_output, present, cache)
            _bind(binding.bind_output, "output", output)
            self._bindings.append(binding)

    def run(self, at: int) -> None:
        """The step on one copy of the caches."""
        self._session.run_with_iobinding(self._bindings[at % len(self._bindings)])


def _bind(bind, name: str, array: Array) -> None:  # type: ignore[no-untyped-def]
    bind(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
