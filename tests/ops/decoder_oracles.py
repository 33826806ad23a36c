"""Inputs for the decoder's own operators, and what the numbers should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tests.singleop import INPUTS
from tq_onnx.ops.domain import (
    GATHER,
    RMS_NORMALIZATION,
    ROTARY_EMBEDDING,
    SWISH,
    TRANSPOSE,
)

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

TYPES: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

#: Half a unit in the last place of an element type, and what float32 loses before it.
TOLERANCE: Final = {
    ir.DataType.FLOAT: 2e-6,
    ir.DataType.FLOAT16: 2.0**-11 + 2e-6,
    ir.DataType.BFLOAT16: 2.0**-8 + 2e-6,
}

#: Shapes of the first input, most of them of no multiple that a kernel would like.
SHAPES: Final[list[tuple[str, Shape]]] = [
    *((RMS_NORMALIZATION, shape) for shape in ((1,), (3, 7), (2, 3, 5, 64), (1, 2, 1100))),
    *((ROTARY_EMBEDDING, shape) for shape in ((1, 1, 1, 2), (2, 3, 5, 64), (2, 1, 9, 6))),
    *((SWISH, shape) for shape in ((), (1,), (3, 5, 7), (9000,))),
    *((TRANSPOSE, shape) for shape in ((1, 1, 1, 1), (2, 3, 4, 5), (3, 1, 7, 64))),
    *((GATHER, shape) for shape in ((1, 1), (11, 3), (40, 64))),
]

EMPTY_SHAPES: Final[list[tuple[str, Shape]]] = [
    *((RMS_NORMALIZATION, shape) for shape in ((0, 8), (3, 0), (0, 0))),
    *((ROTARY_EMBEDDING, shape) for shape in ((0, 2, 3, 8), (1, 0, 3, 8), (1, 2, 0, 8))),
    *((SWISH, shape) for shape in ((0,), (4, 0, 3))),
    *((TRANSPOSE, shape) for shape in ((2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0), (0, 1, 1, 1))),
    *((GATHER, shape) for shape in ((5, 0),)),
]


def decoder_feeds(
    op: str, shape: Shape, dtype: ir.DataType = ir.DataType.FLOAT, *, spread: float = 1.0
) -> dict[str, Array]:
    """Inputs as float32 that the type holds exactly; the first of this shape, the others fit it."""
    rng = np.random.default_rng(sum(shape) + 1)

    def floats(*sizes: int) -> Array:
        made = np.asarray(spread * rng.standard_normal(sizes))
        rounded: Array = made.astype(dtype.numpy()).astype(np.float32)
        return rounded

    feeds = {INPUTS[op][0]: floats(*shape)}
    if op == RMS_NORMALIZATION:
        feeds["scale"] = floats(shape[-1])
    if op == ROTARY_EMBEDDING:
        angles = rng.uniform(0, 6, (17, shape[-1] // 2))
        feeds["cos_cache"] = np.cos(angles).astype(np.float32)
        feeds["sin_cache"] = np.sin(angles).astype(np.float32)
        rows = shape[0] if shape[1] % 2 else 1
        feeds["position_ids"] = rng.integers(0, 17, (rows, shape[2]))
    if op == GATHER:
        feeds["indices"] = rng.integers(-shape[0], shape[0], (3, 2))
    return feeds


def _rms_normalization(feeds: Mapping[str, Array]) -> Array:
    x = feeds["X"].astype(np.float64)
    squares: Array = (
        (x * x).mean(axis=-1, keepdims=True) if x.size else x[..., :0].sum(-1)[..., None]
    )
    normalised: Array = x / np.sqrt(squares + np.float32(1e-6)) * feeds["scale"]
    return normalised


def _rotary_embedding(feeds: Mapping[str, Array]) -> Array:
    first, second = np.split(feeds["X"].astype(np.float64), 2, axis=-1)
    cosines, sines = (
        feeds[name][feeds["position_ids"]][:, None] for name in ("cos_cache", "sin_cache")
    )
    return np.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )


def _swish(feeds: Mapping[str, Array]) -> Array:
    x = feeds["X"].astype(np.float64)
    activated: Array = x / (1 + np.exp(-x))
    return activated


ORACLES: Final[Mapping[str, Callable[[Mapping[str, Array]], Array]]] = {
    RMS_NORMALIZATION: _rms_normalization,
    ROTARY_EMBEDDING: _rotary_embedding,
    SWISH: _swish,
    TRANSPOSE: lambda feeds: feeds["X"].transpose(0, 2, 1, 3),
    GATHER: lambda feeds: feeds["data"][feeds["indices"]],
}


def assert_close(given: Array, expected: Array, dtype: ir.DataType) -> None:
    """Within the type's tolerance of each number, or of 1 where that is more."""
    assert given.shape == expected.shape
    scale = np.maximum(np.abs(expected), 1.0)
    error = np.abs(given.astype(np.float64) - expected) / scale
    assert error.max(initial=0.0) <= TOLERANCE[dtype]
