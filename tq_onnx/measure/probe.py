"""A converted model with exposed internals: the inputs and results of its TurboQuant nodes.

The result of a node can be compared with the numpy reference on the node's own inputs, whichever
backend ran it, with nothing else in between. ``tq_onnx.measure.expose_internals`` makes probes.

A probe needs a session of its own: a value that is an output is neither fused away nor freed, and
all of them are copied in every call, so that this session shows neither the speed nor the memory of
the model as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.acceptance import RowFigures, judge_rows
from tq_onnx.codec.codebook import Codebook
from tq_onnx.codec.elements import ELEMENTS
from tq_onnx.codec.kind import Tables
from tq_onnx.codec.quantise import tables_of
from tq_onnx.codec.reference import offset_rows
from tq_onnx.codec.spec import Codec
from tq_onnx.plan import LayerPlan, Plan
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import made_up_embeddings
from tq_onnx.runtime.providers import CPU, ExecutionProvider
from tq_onnx.runtime.session import make_session
from tq_onnx.runtime.signature import signature_of

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class EncodeNames:
    """Names of the inputs and the result of one encode node, and its baked tables."""

    node: str
    codec: Codec  #: codec of the cache
    norm_correction: int  #: what the scale makes up for, one of ``kind.NORM_CORRECTIONS``
    vectors: str  #: the new vectors
    past_length: str  #: tokens that the cache held before
    present: str  #: the cache
    #: float32 ``[D, C]``; None for a codec that does not rotate
    rotation: npt.NDArray[np.float32] | None
    codebook: Codebook | None  #: centroids and boundaries; None for a codec that does not rotate
    head_size: int  #: D
    #: offsets that are subtracted from vectors, float32 ``[P, N, D]``; None without
    offset: npt.NDArray[np.float32] | None = None
    #: what the offsets turn with, float32 ``[D]``; None, or ``[1]``, where they stay
    frequencies: npt.NDArray[np.float32] | None = None
    #: gains that the encoder tries, float32 ``[G]``; None without
    gains: npt.NDArray[np.float32] | None = None
    #: matrices of error feedback, float32 ``[N, D, D]``; None without
    feedback: npt.NDArray[np.float32] | None = None

    @property
    def tables(self) -> Tables:
        """What the reference makes rows with."""
        return tables_of(
            self.codec,
            self.rotation,
            self.codebook,
            self.norm_correction,
            gains=self.gains,
            feedback=self.feedback,
        )

    @property
    def centroids(self) -> npt.NDArray[np.float32] | None:
        """The centroids of the codebook, if there is one."""
        return None if self.codebook is None else self.codebook.centroids

    def offsets(
        self, sizes: tuple[int, ...], past_length: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Return what is subtracted from vectors of sizes ``(B, N, T, D)`` behind so many tokens.

        Sequences have no padding: no text that is measured has any.
        """
        if self.offset is None:
            return np.zeros(sizes)
        batch, _, new, _ = sizes
        return offset_rows(self.offset, past_length, batch, new, frequencies=self.frequencies)

    @property
    def _turned(self) -> npt.NDArray[np.float64] | None:
        """What an offset that turns is a sum of, at most: ``[N, 1, D]``; None if it does not."""
        if self.offset is None or self.frequencies is None or self.frequencies.size == 1:
            return None
        sums: npt.NDArray[np.float64] = np.abs(self.offset[:2].astype(np.float64)).sum(axis=0)
        return sums[:, None]

    def centered(
        self, vectors: Array, past_length: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Subtract the offsets from vectors ``[B, N, T, D]`` that follow ``past_length`` tokens."""
        wide: npt.NDArray[np.float64] = np.asarray(vectors, np.float64)
        return wide - self.offsets(wide.shape, past_length)

    def judge(
        self,
        rows: Array,
        vectors: Array,
        past_length: npt.NDArray[np.int64],
        dtype: str,
        *,
        unrounded: bool = False,
    ) -> RowFigures:
        """Compare new rows ``[B, N, T, W]`` with what the reference makes of the vectors.

        Args:
            rows: uint8 ``[B, N, T, W]``.
            vectors: floats ``[B, N, T, D]``.
            past_length: tokens in front of them, int64 ``[B]`` or ``[1]``.
        """
        return judge_rows(
            rows,
            self.centered(vectors, past_length),
            self.codec,
            self.tables,
            given=None if self.offset is None else vectors,
            turned=self._turned,
            element=ELEMENTS[dtype],
            unrounded=unrounded,
        )


@dataclass(frozen=True, eq=False)
class LayerNames:
    """Names of the inputs and results of one layer's nodes."""

    plan: LayerPlan
    key: EncodeNames  #: its encode node for keys
    value: EncodeNames  #: its encode node for values
    node: str  #: name of the attention node
    query: str
    bias: str | None  #: its additive mask; None if it has none
    sink: str | None  #: its heads' sinks; None if it has none
    output: str  #: its result

    @property
    def caches(self) -> tuple[EncodeNames, EncodeNames]:
        """Both encode nodes, keys first."""
        return self.key, self.value

    @property
    def is_shortened(self) -> bool:
        """True if a cache is returned without some of its rows, so that no call sees all rows."""
        presents = self.plan.key.present, self.plan.value.present
        return presents != (self.key.present, self.value.present)

    def watched(self) -> list[str]:
        """Return the names of the values that are exposed."""
        names = [self.key.vectors, self.value.vectors, self.key.past_length, self.query]
        return [*names, self.output, *(name for name in (self.bias, self.sink) if name)]


@dataclass(frozen=True, eq=False)
class Probe:
    """A probe that is ready to be opened with or without the library."""

    model: bytes  #: the serialised model
    external_data: Path  #: folder of its external data
    layers: tuple[LayerNames, ...]  #: the exposed layers
    plan: Plan  #: the conversion

    def decoder(
        self,
        *,
        library: bool,
        threads: int | None = None,
        exact: bool = False,
        ep: ExecutionProvider = CPU,
        most: int | None = None,
    ) -> Decoder:
        """Make a decoder of batch 1 whose ``watched`` holds the inner values.

        Args:
            most: capacity of caches that cannot grow because they are on a device.
        """
        session = make_session(
            self.model,
            library=library,
            threads=threads,
            external_data=self.external_data,
            memory_reuse=library,
            exact=exact,
            keeps_codes=False,
            ep=ep,
        )
        watch = dict.fromkeys(name for layer in self.layers for name in layer.watched())
        signature = signature_of(session, self.plan)
        caches = {cache.pair.present for cache in signature.caches}
        return Decoder(
            session,
            signature,
            capacity=(signature.slots or most) if ep.has_own_memory else None,
            watch=[name for name in watch if name not in caches],
            embeddings=made_up_embeddings(session, self.plan.interface),
        )
