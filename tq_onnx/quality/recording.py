"""The logits of an original, recorded once and compared with any number of models after that.

Models are so opened one at a time, however many there are, and the original reads the text once.
The recording is a temporary file without a name, in the folder that ``TMPDIR`` says: predictions x
vocabulary x bytes of the logits' type, 1.2 GB for 6,000 predictions of a vocabulary of 49,152 in
float32. The file is gone when the recording is closed, or the process ends.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.errors import UsageError
from tq_onnx.measure.divergence import Floats, QualityFigures, Sums, read
from tq_onnx.measure.windows import Ids, Window
from tq_onnx.progress import OnProgress
from tq_onnx.runtime.decoder import Decoder

_GIGABYTE: Final = 1e9


class Recording:
    """The predictions of an original on a text; a context manager that owns a temporary file.

    Args:
        tokens: ids ``[n]``.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokens: npt.ArrayLike,
        windows: Sequence[Window],
        *,
        vocabulary: int,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Read the text; see the class for arguments and errors."""
        self._text = np.asarray(tokens, np.int64)
        self._windows = tuple(windows)
        self._vocabulary = vocabulary
        self._dtype = np.dtype(np.float32)
        self._width = 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        try:
            self._record(decoder, on_progress)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def positions(self) -> int:
        """Predictions in the recording."""
        return sum(window.stop - 1 - window.scored for window in self._windows)

    def compare(
        self,
        decoder: Decoder,
        *,
        stride: int,
        name: str = "another model",
        on_progress: OnProgress | None = None,
    ) -> QualityFigures:
        """Read the text with another model and compare its predictions.

        Args:
            stride: tokens by which the windows advance, for the figures.
        """
        sums = Sums()
        self._file.seek(0)
        for logits, following, positions in self._read(decoder, name, on_progress):
            sums.add(self._next(len(logits)), logits, following, positions)
        first = self._windows[0]
        return sums.figures(first.stop - first.start, stride)

    def _record(self, decoder: Decoder, on_progress: OnProgress | None) -> None:
        for logits, _, _ in self._read(decoder, "the original", on_progress):
            if not self._width:
                self._width, self._dtype = logits.shape[-1], logits.dtype
                self._check_room()
            self._file.write(np.ascontiguousarray(logits).data)

    def _read(
        self, decoder: Decoder, name: str, on_progress: OnProgress | None
    ) -> Iterator[tuple[Floats, Ids, Ids]]:
        doing = f"Reading the text with {name}"
        for (logits,), following, positions in read(
            (decoder,), self._text, self._windows, self._vocabulary, on_progress, doing=doing
        ):
            yield logits, following, positions

    def _check_room(self) -> None:
        folder = tempfile.gettempdir()
        size = self.positions * self._width * self._dtype.itemsize
        free = shutil.disk_usage(folder).free
        if size > free:
            raise UsageError(
                f"the original's predictions need {size / _GIGABYTE:.1f} GB for a while, and "
                f"{free / _GIGABYTE:.1f} GB are free",
                where=folder,
                fix="read fewer tokens, or set TMPDIR to a folder with more room",
            )

    def _next(self, rows: int) -> npt.NDArray[Any]:
        """Read the next rows of the file: ``[rows, vocabulary]``."""
        data = self._file.read(rows * self._width * self._dtype.itemsize)
        return np.frombuffer(data, self._dtype).reshape(rows, self._width)
