"""The ladder: numpy reference, function body and kernel, each against the one before it.

Every TurboQuant node of the probed layers is judged on its own inputs, taken from the running
model:

- encode: codes and fields of the new rows against ``codec.reference.encode``
  (``tq_onnx.measure.rowcomparison``);
- attention: the result against float64 attention over the decoded cache;
- reconstruction: the relative squared error of the decoded rows against the vectors that went in,
  next to what theory says of this codec, or within what its steps allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache as cached
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec import reference
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.rotation import make_sketch
from tq_onnx.codec.spec import FP8, FP8_MAX, PROD, Q8_0, Q8_0_BLOCK, Codec
from tq_onnx.measure.probe import EncodeNames, LayerNames
from tq_onnx.measure.rowcomparison import ELEMENTS, compare_rows
from tq_onnx.runtime.decoder import Decoder

KERNEL: Final = "kernel"
BODY: Final = "function body"
DEVICE: Final = "kernel on {}"
"""Name of the backend that an execution provider with its own memory is."""

ORACLE_QUERIES: Final = 32

_THEORY_ROWS: Final = 20_000
_COMPARED_ROWS: Final = 1024
"""Rows that are compared with each other, to see how alike they are."""

_HALF: Final = 2.0**-11
_SMALLEST_HALF: Final = 2.0**-25
"""Half a step of float16, of normal numbers relatively, and below."""
_ROUNDING: Final = 1 + 1e-4

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
        scale_steps: largest distance of a field, in steps of its type.
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
        error: mean over these rows of squared error over squared norm, both of what is encoded:
            with offsets, of what they leave.
        theory: the same for random directions; None for codecs that do not rotate, whose error
            depends on the vectors.
        spread: standard error of ``error``; rows that are alike count as fewer.
        share: for those, the largest error of a row over the most that its steps allow.
    """

    layer: int
    cache: str
    codec: str
    rows: int
    error: float
    theory: float | None
    spread: float
    share: float | None = None

    @property
    def excess(self) -> float:
        """Relative distance from theory; 0.01 is one percent more error; NaN without theory."""
        if self.theory is None:
            return float("nan")
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
    found = [
        compare_rows(
            cache[:, :, int(length[0]) :],
            seen[names.vectors],
            names,
            length,
            layer.plan.dtype,
            body=backend == BODY,
        )
        for names, cache in zip((layer.key, layer.value), caches, strict=True)
    ]
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
        key_codebook=layer.key.centroids,
        value_rotation=layer.value.rotation,
        value_codebook=layer.value.centroids,
        scale=layer.plan.scale,
        causal=layer.plan.causal,
        sliding_window=layer.plan.sliding_window,
        softcap=layer.plan.softcap,
        attention_bias=bias,
        head_sink=None if layer.sink is None else seen[layer.sink],
        key_offset=layer.key.offset,
        value_offset=layer.value.offset,
        element=ELEMENTS[layer.plan.dtype],
    )
    given = output[:, :, skip:].astype(np.float64)
    error = float(np.abs(given - expected).max() / max(np.abs(expected).max(), 1e-30))
    figures = LadderFigures(
        layer.plan.layer,
        backend,
        codes=sum(one.codes for one in found),
        codes_differing=sum(one.differing for one in found),
        codes_wrong=sum(one.wrong for one in found),
        scale_steps=max(one.steps for one in found),
        attention_error=error,
    )
    return figures, caches


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
        given = seen[names.vectors]
        new = rows[:, :, -given.shape[2] :]
        vectors = names.centered(given, np.array([rows.shape[2] - given.shape[2]]))
        decoded = decoded_rows(new, names, layer.plan.dtype)
        energy = (vectors**2).sum(axis=-1)
        counted = (energy > 0) & _first_of_its_kind(new)
        squares = ((vectors - decoded) ** 2).sum(axis=-1)[counted]
        errors = squares / energy[counted]
        share = None
        if not (names.codec.is_rotated or names.codec.is_raw):
            most = largest_error(vectors[counted], names.codec)
            share = float((squares / most).max(initial=0))
        figures.append(
            ReconstructionFigures(
                layer=layer.plan.layer,
                cache=cache,
                codec=str(names.codec),
                rows=int(counted.sum()),
                error=float(errors.mean()),
                theory=theory(names.codec, layer.plan.head_size, names.norm_correction),
                spread=_spread(errors, vectors[counted], names),
                share=share,
            )
        )
    return figures


def decoded_rows(rows: Array, names: EncodeNames, dtype: str) -> npt.NDArray[np.float64]:
    """Rows ``[..., W]`` as what was encoded, ``[..., D]``; ``dtype`` is the model's element type.

    With offsets this is what they left of the vectors.
    """
    return reference.decode(
        rows,
        names.codec,
        names.rotation,
        names.codebook,
        head_size=names.head_size,
        element=ELEMENTS[dtype],
    )


def _first_of_its_kind(rows: Array) -> npt.NDArray[np.bool_]:
    """Which rows ``[B, N, T, W]`` were not seen before in their head: bool ``[B, N, T]``."""
    first = np.zeros(rows.shape[:3], np.bool_)
    for b, n in np.ndindex(*rows.shape[:2]):
        first[b, n, np.unique(rows[b, n], axis=0, return_index=True)[1]] = True
    return first


def _spread(
    errors: npt.NDArray[np.float64], vectors: npt.NDArray[np.float64], names: EncodeNames
) -> float:
    """Standard error of the mean error of rows ``[n]``, whose vectors are ``[n, D]``.

    Keys of one head may all point into nearly the same direction. A rotation then draws one error
    for all of them, and many rows tell no more than one.
    """
    count = max(len(errors), 1)
    alone = float(errors.std() / np.sqrt(count))
    if not names.codec.is_rotated:
        return alone
    some = vectors[:: -(-count // _COMPARED_ROWS)]
    units = some / np.linalg.norm(some, axis=-1, keepdims=True)
    alike = float(((units @ units.T) ** 2).mean())
    single = _simulated(names.codec, names.head_size, names.norm_correction)[1]
    return max(alone, single * float(np.sqrt(alike)))


def theory(codec: Codec, head_size: int, norm_correction: bool) -> float | None:
    """Mean relative squared error of random directions, by simulation; good to about 0.1 %.

    A random direction stays one under any rotation, so none is applied. None for codecs that do
    not rotate: their error depends on the vectors.
    """
    if codec.is_raw:
        return 0.0
    return _simulated(codec, head_size, norm_correction)[0] if codec.is_rotated else None


@cached
def _simulated(codec: Codec, head_size: int, norm_correction: bool) -> tuple[float, float]:
    """Mean and standard deviation of the error of random directions."""
    draws = np.random.default_rng(0).standard_normal((_THEORY_ROWS, head_size))
    vectors = draws / np.linalg.norm(draws, axis=-1, keepdims=True)
    rotation = np.eye(head_size, dtype=np.float32)
    if codec.kind == PROD:
        rotation = np.concatenate([rotation, make_sketch(head_size, 0).T], axis=1)
    codebook = codebook_of(codec, head_size)
    rows = reference.encode(vectors, codec, rotation, codebook, norm_correction)
    decoded = reference.decode(rows, codec, rotation, codebook)
    errors = ((vectors - decoded) ** 2).sum(axis=-1)
    return float(errors.mean()), float(errors.std())


def largest_error(vectors: npt.NDArray[np.float64], codec: Codec) -> npt.NDArray[np.float64]:
    """The largest squared error of vectors ``[n, D]`` that the steps of a codec allow: ``[n]``.

    Half a step for every coordinate, and what the fields lose by being stored as float16.
    """
    if codec.kind == FP8:
        kept = np.minimum(np.abs(vectors), FP8_MAX)
        # Three bits of mantissa, and steps of 2^-9 below the smallest normal number.
        errors = np.maximum(kept * 2.0**-4, 2.0**-10) + np.abs(vectors) - kept
    elif codec.kind == Q8_0:
        starts = range(0, vectors.shape[-1], Q8_0_BLOCK)
        blocks = [np.abs(vectors[:, at : at + Q8_0_BLOCK]) for at in starts]
        largest = [np.broadcast_to(b.max(axis=-1, keepdims=True), b.shape) for b in blocks]
        top = np.concatenate(largest, axis=-1)
        errors = top / 254 + top * _HALF + 127 * _SMALLEST_HALF
    else:
        low, high = vectors.min(axis=-1, keepdims=True), vectors.max(axis=-1, keepdims=True)
        steps = (1 << codec.bits) - 1
        stored = (high - low + np.abs(low)) * _HALF + (steps + 1) * _SMALLEST_HALF
        errors = np.broadcast_to((high - low) / (2 * steps) + stored, vectors.shape)
    total: npt.NDArray[np.float64] = (_ROUNDING * errors**2).sum(axis=-1)
    return total


def _cache(decoder: Decoder, present: str) -> Array:
    for index, spec in enumerate(decoder.signature.caches):
        if spec.pair.present == present:
            return decoder.cache(index)
    raise KeyError(present)
