"""What the tests of the codec encode, and with what."""

from __future__ import annotations

from functools import cache

import numpy as np

from tq_onnx.codec import reference
from tq_onnx.codec.codebook import Codebook, codebook_of
from tq_onnx.codec.presets import QR
from tq_onnx.codec.rotated import PROD
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.spec import CODECS, Codec

KINDS = [codec for codec in CODECS if not codec.is_raw]
"""Every codec that quantises."""

ROTATED = [codec for codec in KINDS if codec.is_rotated]
PRODS = [codec for codec in KINDS if codec.kind == PROD]


@cache
def tables(
    codec: Codec,
    head_size: int,
    kind: str = QR,
    seed: int = 42,
) -> tuple[np.ndarray | None, Codebook | None]:
    """Rotation and codebook of a codec; None where it has none."""
    if not codec.is_rotated:
        return None, None
    return rotation_of(codec, kind, head_size, 0, seed), codebook_of(codec, head_size)


def encode(x: np.ndarray, codec: Codec, *, norm_correction: bool = True) -> np.ndarray:
    return reference.encode(x, codec, *tables(codec, x.shape[-1]), norm_correction)


def decode(rows: np.ndarray, codec: Codec, head_size: int) -> np.ndarray:
    return reference.decode(rows, codec, *tables(codec, head_size), head_size=head_size)


def unit_vectors(count: int, head_size: int, seed: int = 0) -> np.ndarray:
    x = np.random.RandomState(seed).standard_normal((count, head_size))
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def relative_error(x: np.ndarray, decoded: np.ndarray) -> float:
    """Mean over vectors of ||x - x'||^2 / ||x||^2."""
    return float(np.mean(np.sum((x - decoded) ** 2, axis=-1) / np.sum(x**2, axis=-1)))
