"""The original that conversions are compared with: read once, however many there are."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tq_onnx.conversion.branches import load_again, split
from tq_onnx.conversion.original import recognise_original
from tq_onnx.files.load import LoadedModel, load
from tq_onnx.measure.feeding_modes import CallDistance, call_distances
from tq_onnx.measure.readings import read_original, with_float_products
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_original
from tq_onnx.verification.checks import PropertyCheck
from tq_onnx.verification.fidelity import RawOriginal, convert_raw

Ids = npt.NDArray[np.int64]


class Baseline:
    """An original, or one part of a merged one, with what was found in it.

    Args:
        is_kept: whether it serves several conversions, and so stays in memory behind the first.
    """

    def __init__(
        self,
        path: Path,
        graph: LoadedModel,
        *,
        threads: int | None = None,
        is_kept: bool = False,
    ) -> None:
        """Take the original as it is; it is opened when it is needed."""
        self.path = path
        self._graph = graph
        self._threads = threads
        self._is_kept = is_kept
        self._distances: dict[tuple[bytes, int], list[CallDistance]] = {}
        self._raw: dict[tuple[bytes, bool], RawOriginal | PropertyCheck] = {}

    @classmethod
    def of(cls, path: Path, *, threads: int | None = None, is_kept: bool = False) -> Baseline:
        """Read the file of an original that is not a merged one."""
        return cls(path, load(path), threads=threads, is_kept=is_kept)

    def parts(self) -> tuple[Baseline, ...]:
        """Return the parts of a merged model, the one that takes caches last; else nothing."""
        branches = split(self._graph)
        if branches is None:
            return ()
        return tuple(
            Baseline(self.path, part, threads=self._threads, is_kept=self._is_kept)
            for part in (branches.first, branches.following)
        )

    @cached_property
    def opened(self) -> OpenModel:
        """The original as it is."""
        return open_original(self.path, loaded=self._graph, threads=self._threads)

    @cached_property
    def floats(self) -> OpenModel:
        """The original with quantised weights that are multiplied as floats."""
        return with_float_products(self.opened, self._graph, library=False, threads=self._threads)

    def call_distances(self, prompt: Ids, chunk: int) -> list[CallDistance]:
        """Return how far its caches are off where a prompt is read in chunks."""
        key = prompt.tobytes(), chunk
        if key not in self._distances:
            self._distances[key] = call_distances(self.floats, prompt, chunk)
        return self._distances[key]

    def raw(self, prompt: Ids, *, library: bool) -> RawOriginal | PropertyCheck:
        """Return it converted without codecs, and what that makes of a prompt."""
        key = prompt.tobytes(), library
        if key not in self._raw:
            reading = read_original(self.floats, prompt)
            # The conversion changes the graph.
            graph = load_again(self._graph) if self._is_kept else self._graph
            recognition = None if self._is_kept else self.opened.recognition
            original = recognise_original(graph, self.path, recognition=recognition)
            self.close()
            self._raw[key] = convert_raw(
                original, prompt, reading, library=library, threads=self._threads
            )
        return self._raw[key]

    def close(self) -> None:
        """Give up the sessions, unless other conversions need them."""
        if not self._is_kept:
            for name in ("opened", "floats"):
                self.__dict__.pop(name, None)

    def release(self) -> None:
        """Give up all that was made of it, unless other conversions need that."""
        self.close()
        if not self._is_kept:
            self._raw.clear()
