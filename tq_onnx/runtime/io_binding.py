"""A session with everything that it reads and writes bound to its provider's memory.

For models of a node or two that are run many times with the same numbers: what is timed is the run,
its wait for the device included, and no copy between host and device.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from tq_onnx.runtime.errors import run_error
from tq_onnx.runtime.providers import provider_of

Array = npt.NDArray[Any]


class BoundModel:
    """Inputs bound once, outputs where they are made.

    Args:
        session: from ``make_session``.
        inputs: all of them.
        on_host: names of inputs that the nodes read on the host.
        in_place: names of outputs that are written over an input, and of that input.
        where: what errors call it.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        inputs: Mapping[str, Array],
        *,
        on_host: Collection[str] = (),
        in_place: Mapping[str, str] | None = None,
        where: str = "the model",
    ) -> None:
        """Copy the inputs; see the class."""
        self._session = session
        self._where = where
        self._ep = provider_of(session)
        self._names = [entry.name for entry in session.get_outputs()]
        self._binding = session.io_binding()
        shared = in_place or {}
        for name, array in inputs.items():
            device = "cpu" if name in on_host else self._ep.device
            whole = np.ascontiguousarray(array)
            value = onnxruntime.OrtValue.ortvalue_from_numpy(whole, device, 0)
            self._binding.bind_ortvalue_input(name, value)
            for output, source in shared.items():
                if source == name:
                    self._binding.bind_ortvalue_output(output, value)
        for name in self._names:
            if name not in shared:
                self._binding.bind_output(name, self._ep.device)

    def run(self) -> dict[str, Array]:
        """Return the outputs of one run, by name.

        Raises:
            TqOnnxError: it does not run.
        """
        self._once()
        values = self._binding.get_outputs()
        arrays = {name: value.numpy() for name, value in zip(self._names, values, strict=True)}
        return {name: np.array(array) for name, array in arrays.items()}

    def seconds(self, runs: int, wake: int) -> list[float]:
        """Return the times of so many runs, after others that are not counted.

        Raises:
            TqOnnxError: it does not run.
        """
        times = []
        for number in range(wake + runs):
            begin = time.perf_counter()
            self._once()
            if number >= wake:
                times.append(time.perf_counter() - begin)
        return times

    def _once(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
            self._binding.synchronize_outputs()
        except Exception as error:
            raise run_error(error, self._where, self._ep) from error
