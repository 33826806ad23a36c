"""Errors of caches: their rows against the vectors that went in, and against the original's caches.

- Reconstruction: the relative squared error of the decoded rows against the vectors that went in,
  next to what theory says of this codec, or within what its steps allow.
- Distance: the relative squared distance from the original's caches on the same tokens. In the
  first layer both models cache the same vectors, so the distance is that of the codec alone; more
  than that means that the two files hold different weights. From layer to layer it grows, because
  each layer reads what the quantised ones before it made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache as cached
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec import extremes, reference
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.elements import ELEMENTS
from tq_onnx.codec.rotation import make_sketch
from tq_onnx.codec.spec import Codec
from tq_onnx.measure.probe import EncodeNames, LayerNames, Probe
from tq_onnx.measure.readings import widened

_THEORY_ROWS: Final = 20_000
_FED_ROWS: Final = 640
"""The same with error feedback, whose reference is slow."""

_COMPARED_ROWS: Final = 1024
"""Rows that are compared with each other, to see how alike they are."""

_ROUNDING: Final = 1 + 1e-4

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ReconstructionFigures:
    """The error of one cache of one layer.

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
        share: for codecs that do not rotate, the largest error of a row over the most that its
            steps allow; else None.
        extremes: vectors that these rows cannot hold; None if they were not counted.
    """

    layer: int
    cache: str
    codec: str
    rows: int
    error: float
    theory: float | None
    spread: float
    share: float | None = None
    extremes: extremes.Extremes | None = None

    @property
    def excess(self) -> float:
        """Relative distance from theory; 0.01 is one percent more error; NaN without theory."""
        if self.theory is None:
            return float("nan")
        if self.theory == 0:  # nothing is lost
            return 0.0 if self.error == 0 else float("inf")
        return self.error / self.theory - 1


@dataclass(frozen=True)
class CacheDistance:
    """One layer's caches against the original's.

    Attributes:
        layer: index of the layer.
        key: squared distance of all keys over the squared norm of the original's; where keys are
            equalised, after each channel of the original's is scaled as the converted ones are.
        value: the same of the values.
        key_expected: the distance of keys that quantisation alone should make.
        value_expected: the distance of values that quantisation alone should make.
    """

    layer: int
    key: float
    value: float
    key_expected: float = 0.0
    value_expected: float = 0.0


def reconstruction(
    seen: Mapping[str, Array], layer: LayerNames, caches: tuple[Array, Array]
) -> list[ReconstructionFigures]:
    """Measure the errors of the rows at the end of the caches, next to theory.

    Args:
        caches: key rows and value rows ``[1, N, S, W]``.
    """
    figures = []
    roles = (("key", layer.key), ("value", layer.value))
    for (cache, names), rows in zip(roles, caches, strict=True):
        new_vectors = seen[names.vectors]
        new = rows[:, :, -new_vectors.shape[2] :]
        vectors = names.centered(new_vectors, np.array([rows.shape[2] - new_vectors.shape[2]]))
        decoded = decoded_rows(new, names, layer.plan.dtype)
        energy = (vectors**2).sum(axis=-1)
        counted = (energy > 0) & _first_of_its_kind(new)
        squares = ((vectors - decoded) ** 2).sum(axis=-1)[counted]
        errors = squares / energy[counted]
        # Vectors of zeros have no relative error; one of NaN must not look like those.
        error = float(errors.mean()) if errors.size else float(0 * energy.sum())
        share = None
        if names.codec.record.step_error is not None:
            most = largest_error(vectors[counted], names.codec)
            share = float((squares / most).max(initial=0))
        figures.append(
            ReconstructionFigures(
                layer=layer.plan.layer,
                cache=cache,
                codec=str(names.codec),
                rows=int(counted.sum()),
                error=error,
                theory=_theory_of(names),
                spread=_spread(errors, vectors[counted], names),
                share=share,
                extremes=extremes.of_rows(
                    new,
                    vectors,
                    names.codec,
                    names.centroids,
                    layer=layer.plan.layer,
                    cache=cache,
                ),
            )
        )
    return figures


def decoded_rows(rows: Array, names: EncodeNames, dtype: str) -> npt.NDArray[np.float64]:
    """Decode rows ``[..., W]`` to ``[..., D]``; ``dtype`` is the model's element type.

    With offsets the result is the vectors less the offsets.
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
    """Mark rows ``[B, N, T, W]`` that are the first of their kind in their head: ``[B, N, T]``."""
    first = np.zeros(rows.shape[:3], np.bool_)
    for b, n in np.ndindex(*rows.shape[:2]):
        first[b, n, np.unique(rows[b, n], axis=0, return_index=True)[1]] = True
    return first


def _spread(
    errors: npt.NDArray[np.float64], vectors: npt.NDArray[np.float64], names: EncodeNames
) -> float:
    """Return the standard error of the mean error of rows ``[n]``, whose vectors are ``[n, D]``.

    Keys of one head may all point into nearly the same direction. A rotation then draws one error
    for all of them, and many rows tell no more than one.
    """
    count = len(errors)
    if count == 0:
        return 0.0
    alone = float(errors.std() / np.sqrt(count))
    if not names.codec.is_rotated:
        return alone
    some = vectors[:: -(-count // _COMPARED_ROWS)]
    units = some / np.linalg.norm(some, axis=-1, keepdims=True)
    alike = float(((units @ units.T) ** 2).mean())
    single = _promised(*_facts(names)).deviation
    return max(alone, single * float(np.sqrt(alike)))


def theory(
    codec: Codec,
    head_size: int,
    norm_correction: int,
    gains: npt.NDArray[np.float32] | None = None,
    feedback: npt.NDArray[np.float32] | None = None,
) -> float | None:
    """Return the mean relative squared error of random directions, simulated to about 0.1 %.

    A random direction stays one under any rotation, so none is applied. None for codecs that do
    not rotate: their error depends on the vectors. With error feedback it is that of these very
    matrices, simulated to about 0.5 %.
    """
    if codec.is_raw:
        return 0.0
    if not codec.is_rotated:
        return None
    return _promised(codec, head_size, norm_correction, gains, feedback).mean


def _theory_of(names: EncodeNames) -> float | None:
    return theory(*_facts(names))


def _facts(
    names: EncodeNames,
) -> tuple[Codec, int, int, npt.NDArray[np.float32] | None, npt.NDArray[np.float32] | None]:
    return names.codec, names.head_size, names.norm_correction, names.gains, names.feedback


@dataclass(frozen=True)
class _Promise:
    """The relative squared error of random directions."""

    mean: float
    deviation: float  #: its standard deviation


def _promised(
    codec: Codec,
    head_size: int,
    norm_correction: int,
    gains: npt.NDArray[np.float32] | None,
    feedback: npt.NDArray[np.float32] | None,
) -> _Promise:
    """Return the error of random directions."""
    tried = None if gains is None else tuple(gains.tolist())
    fed = None if feedback is None else (feedback.shape, feedback.tobytes())
    return _simulated(codec, head_size, norm_correction, tried, fed)


@cached
def _simulated(
    codec: Codec,
    head_size: int,
    norm_correction: int,
    gains: tuple[float, ...] | None,
    fed: tuple[tuple[int, ...], bytes] | None,
) -> _Promise:
    feedback = None if fed is None else np.frombuffer(fed[1], np.float32).reshape(fed[0])
    rows = _THEORY_ROWS if fed is None else _FED_ROWS // fed[0][0]
    heads = 1 if fed is None else fed[0][0]
    draws = np.random.default_rng(0).standard_normal((heads, rows, head_size))
    vectors = draws / np.linalg.norm(draws, axis=-1, keepdims=True)
    rotation = np.eye(head_size, dtype=np.float32)
    if codec.has_sketch:
        rotation = np.concatenate([rotation, make_sketch(head_size, 0).T], axis=1)
    codebook = codebook_of(codec, head_size)
    encoded = reference.encode(
        vectors,
        codec,
        rotation,
        codebook,
        norm_correction,
        gains=None if gains is None else np.array(gains, np.float32),
        feedback=feedback,
    )
    decoded = reference.decode(encoded, codec, rotation, codebook)
    errors = ((vectors - decoded) ** 2).sum(axis=-1) / (vectors**2).sum(axis=-1)
    return _Promise(float(errors.mean()), float(errors.std()))


def largest_error(vectors: npt.NDArray[np.float64], codec: Codec) -> npt.NDArray[np.float64]:
    """Return the largest squared error of vectors ``[n, D]`` that a codec's steps allow: ``[n]``.

    Half a step for every coordinate, and what the fields lose by being stored as float16.
    """
    step_error = codec.record.step_error
    assert step_error is not None  # of every kind that neither rotates nor keeps the elements
    errors = step_error(vectors, codec.bits)
    total: npt.NDArray[np.float64] = (_ROUNDING * errors**2).sum(axis=-1)
    return total


def cache_distances(
    original: Sequence[Array], converted: Sequence[Array], probe: Probe
) -> list[CacheDistance]:
    """Compare the caches of both models after the same prompt.

    Args:
        original: floats ``[B, N, S, D]``, keys and values alternating; values may be narrower.
        converted: uint8 ``[B, N, S, W]`` in the same order.
    """
    figures = []
    for index, layer in enumerate(probe.layers):
        keys, values = (array.astype(np.float64) for array in original[2 * index : 2 * index + 2])
        rows = converted[2 * index : 2 * index + 2]
        if layer.plan.equalised:
            keys = _scaled(keys, _decoded(rows[0], layer.key, layer))
        key, key_expected = _distance(keys, rows[0], layer.key, layer)
        values = widened(values, layer.plan.head_size)
        value, value_expected = _distance(values, rows[1], layer.value, layer)
        figures.append(CacheDistance(layer.plan.layer, key, value, key_expected, value_expected))
    return figures


def _decoded(rows: Array, names: EncodeNames, layer: LayerNames) -> Floats:
    """Decode a converted cache, offsets included."""
    return decoded_rows(rows, names, layer.plan.dtype) + _offsets(rows, names)


def _offsets(rows: Array, names: EncodeNames) -> Floats:
    return names.offsets((*rows.shape[:3], names.head_size), np.zeros(1, np.int64))


def _scaled(keys: Floats, converted_keys: Floats) -> Floats:
    """Scale the channels of keys by what fits a converted model's best."""
    products = (keys * converted_keys).sum(axis=(0, 2), keepdims=True)
    energies = (keys * keys).sum(axis=(0, 2), keepdims=True)
    scaled: Floats = keys * (products / np.where(energies > 0, energies, 1))
    return scaled


def _distance(
    vectors: Floats, rows: Array, names: EncodeNames, layer: LayerNames
) -> tuple[float, float]:
    """Return the distance, and the distance that quantisation alone should make."""
    energy = max(float((vectors**2).sum()), 1e-300)
    lost = _decoded(rows, names, layer) - vectors
    distance = float((lost**2).sum()) / energy
    residual = vectors - _offsets(rows, names)
    if names.codec.is_rotated:
        expected = float((residual**2).sum()) * _promised(*_facts(names)).mean
    elif names.codec.is_raw:
        expected = 0.0
    else:
        expected = float(largest_error(residual.reshape(-1, names.head_size), names.codec).sum())
    return distance, expected / energy
