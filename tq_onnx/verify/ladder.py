"""The ladder: numpy reference, function body and kernel, each against the one before it.

Every TurboQuant node of the probed layers is judged on its own inputs, taken from the running
model:

- encode: codes and scales of the new rows against ``codec.reference.encode``. A code may differ
  only where the rotated coordinate lies on a decision boundary to within float32 rounding, a scale
  by one float16 step;
- attention: the result against float64 attention over the decoded cache;
- reconstruction: the relative squared error of the decoded rows against the vectors that went in,
  next to what theory says of this codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache as cached
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec import reference
from tq_onnx.codec.bitpack import unpack
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.verify.probe import EncodeNames, LayerNames

KERNEL: Final = "kernel"
BODY: Final = "function body"

TIE_DISTANCE: Final = 5e-7
"""A coordinate of a unit vector nearer than this to a boundary may fall on either side: rotating
in float32 rounds each of D products and sums, which gives up to some 1e-7."""

BODY_TIE_DISTANCE: Final = {"FLOAT": TIE_DISTANCE, "FLOAT16": 1.5e-4, "BFLOAT16": 1.2e-3}
"""The same for function bodies, by the model's element type. ONNX Runtime computes 16-bit nodes in
float32 on the CPU and leaves out roundings between them, so that a body may see vectors before
they are rounded to the values that a kernel, and the graph's own output, see."""

ORACLE_QUERIES: Final = 32

_THEORY_ROWS: Final = 20_000
_ELEMENTS: Final = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LadderFigures:
    """One backend against the reference, on one layer.

    Attributes:
        layer: index of the layer.
        backend: ``KERNEL`` or ``BODY``.
        codes: codes compared, keys and values.
        codes_differing: codes that differ.
        codes_wrong: those among them that are no boundary ties.
        scale_steps: largest distance of a scale, in float16 steps.
        attention_error: largest absolute error over the largest absolute value of the result.
    """

    layer: int
    backend: str
    codes: int
    codes_differing: int
    codes_wrong: int
    scale_steps: int
    attention_error: float


@dataclass(frozen=True)
class ReconstructionFigures:
    """How well one cache of one layer holds what was put in.

    Attributes:
        layer: index of the layer.
        cache: ``key`` or ``value``.
        codec: the codec.
        rows: distinct rows measured. A row that comes again is no new evidence: in the first layer
            values depend on the token alone, and a text repeats its tokens.
        error: mean over these rows of squared error over squared norm.
        theory: the same for random directions.
        spread: standard error of ``error``, taking the rows for independent.
    """

    layer: int
    cache: str
    codec: str
    rows: int
    error: float
    theory: float
    spread: float

    @property
    def excess(self) -> float:
        """Relative distance from theory; 0.01 is one percent more error."""
        if self.theory == 0:  # nothing is lost
            return 0.0 if self.error == 0 else float("inf")
        return self.error / self.theory - 1


def judge_layer(
    decoder: Decoder, layer: LayerNames, backend: str
) -> tuple[LadderFigures, tuple[Array, Array]]:
    """Judges one layer on the decoder's last call.

    Args:
        decoder: from ``Probe.decoder``, after a call.
        layer: what to look at.
        backend: what runs the nodes: ``KERNEL`` or ``BODY``.

    Returns:
        The figures, and the caches' used parts: key rows and value rows ``[1, N, S, W]``.
    """
    seen = decoder.watched
    length = np.asarray(seen[layer.key.past_length], np.int64).reshape(-1)
    caches = _cache(decoder, layer.plan.key.present), _cache(decoder, layer.plan.value.present)
    tie = TIE_DISTANCE if backend == KERNEL else BODY_TIE_DISTANCE[layer.plan.dtype]
    codes = differing = wrong = steps = 0
    for names, cache in zip((layer.key, layer.value), caches, strict=True):
        rows = cache[:, :, int(length[0]) :]
        counts = _compare_rows(rows, seen[names.vectors], names, tie, layer.plan.dtype)
        codes += rows.shape[0] * rows.shape[1] * rows.shape[2] * layer.plan.head_size
        differing += counts[0]
        wrong += counts[1]
        steps = max(steps, counts[2])
    query, output = seen[layer.query], seen[layer.output]
    # The last queries see the most keys; the oracle is slow, so it answers no more than these.
    skip = max(0, query.shape[2] - ORACLE_QUERIES)
    bias = None if layer.bias is None else seen[layer.bias]
    if bias is not None and bias.shape[2] > 1:
        bias = bias[:, :, skip:]
    expected = reference.attention(
        query[:, :, skip:],
        *caches,
        length + skip,
        key=layer.key.codec,
        value=layer.value.codec,
        key_rotation=layer.key.rotation,
        key_codebook=layer.key.codebook.centroids,
        value_rotation=layer.value.rotation,
        value_codebook=layer.value.codebook.centroids,
        scale=layer.plan.scale,
        causal=layer.plan.causal,
        sliding_window=layer.plan.sliding_window,
        softcap=layer.plan.softcap,
        attention_bias=bias,
        head_sink=None if layer.sink is None else seen[layer.sink],
        element=_ELEMENTS[layer.plan.dtype],
    )
    found = output[:, :, skip:].astype(np.float64)
    error = float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30))
    return (
        LadderFigures(layer.plan.layer, backend, codes, differing, wrong, steps, error),
        caches,
    )


def reconstruction(
    seen: Mapping[str, Array], layer: LayerNames, caches: tuple[Array, Array]
) -> list[ReconstructionFigures]:
    """Errors of the rows at the end of the caches, next to theory.

    Args:
        seen: the vectors that became these rows, by their names.
        layer: the layer.
        caches: key rows and value rows ``[1, N, S, W]``.
    """
    figures = []
    both = (("key", layer.key), ("value", layer.value))
    for (cache, names), rows in zip(both, caches, strict=True):
        vectors = seen[names.vectors].astype(np.float64)
        new = rows[:, :, -vectors.shape[2] :]
        decoded = decoded_rows(new, names, layer.plan.dtype)
        energy = (vectors**2).sum(axis=-1)
        counted = (energy > 0) & _first_of_its_kind(new)
        errors = ((vectors - decoded) ** 2).sum(axis=-1)[counted] / energy[counted]
        figures.append(
            ReconstructionFigures(
                layer=layer.plan.layer,
                cache=cache,
                codec=str(names.codec),
                rows=int(counted.sum()),
                error=float(errors.mean()),
                theory=theory(names.codec, layer.plan.head_size, names.norm_correction),
                spread=float(errors.std() / np.sqrt(max(len(errors), 1))),
            )
        )
    return figures


def decoded_rows(rows: Array, names: EncodeNames, dtype: str) -> npt.NDArray[np.float64]:
    """Rows ``[..., W]`` as vectors ``[..., D]``; ``dtype`` is the model's element type."""
    return reference.decode(
        rows, names.codec, names.rotation, names.codebook, element=_ELEMENTS[dtype]
    )


def _first_of_its_kind(rows: Array) -> npt.NDArray[np.bool_]:
    """Which rows ``[B, N, T, W]`` were not seen before in their head: bool ``[B, N, T]``."""
    first = np.zeros(rows.shape[:3], np.bool_)
    for b, n in np.ndindex(*rows.shape[:2]):
        first[b, n, np.unique(rows[b, n], axis=0, return_index=True)[1]] = True
    return first


@cached
def theory(codec: Codec, head_size: int, norm_correction: bool) -> float:
    """Mean relative squared error of random directions, by simulation; good to about 0.1 %.

    A random direction stays one under any rotation, so none is applied.
    """
    if codec.is_raw:
        return 0.0
    draws = np.random.default_rng(0).standard_normal((_THEORY_ROWS, head_size))
    vectors = draws / np.linalg.norm(draws, axis=-1, keepdims=True)
    unit = np.eye(head_size, dtype=np.float32)
    codebook = lloyd_max(codec.bits, head_size)
    rows = reference.encode(vectors, codec, unit, codebook, norm_correction)
    decoded = reference.decode(rows, codec, unit, codebook)
    return float(((vectors - decoded) ** 2).sum(axis=-1).mean())


def _compare_rows(
    rows: Array, vectors: Array, names: EncodeNames, tie: float, dtype: str
) -> tuple[int, int, int]:
    """Codes that differ, codes that differ and are no ties, largest distance of scales."""
    if names.codec.is_raw:
        wanted = reference.encode(vectors, names.codec, None, None, element=_ELEMENTS[dtype])
        wrong = int((rows != wanted).sum())
        return wrong, wrong, 0
    head_size = vectors.shape[-1]
    layout = row_layout(names.codec, head_size)
    expected = reference.encode(
        vectors, names.codec, names.rotation, names.codebook, names.norm_correction
    )
    differs = unpack(rows, layout) != unpack(expected, layout)
    _, rotated = reference.rotate(vectors, names.rotation)
    boundaries = names.codebook.boundaries.astype(np.float64)
    distance = np.abs(rotated[differs][:, None] - boundaries).min(axis=-1, initial=np.inf)
    scales = [
        np.ascontiguousarray(part[..., layout.scale_offset :]).view("<i2").astype(np.int64)
        for part in (rows, expected)
    ]
    # Where a tied code differs, the scale follows it; only rows of equal codes are compared.
    steps = np.abs(scales[0] - scales[1])[..., 0][~differs.any(axis=-1)]
    return (
        int(differs.sum()),
        int((distance > tie).sum()),
        int(steps.max(initial=0)),
    )


def _cache(decoder: Decoder, present: str) -> Array:
    for index, spec in enumerate(decoder.signature.caches):
        if spec.pair.present == present:
            return decoder.cache(index)
    raise KeyError(present)
