"""Seeded orthogonal matrices, one per layer; float32 ``[D, D]``, applied as ``x @ R``.

``qr``: the Q factor of a Gaussian matrix with the signs of T's diagonal folded in, which makes it
Haar distributed (Mezzadri 2007). The Gaussian matrix is the one that

    torch.randn(d, d, generator=torch.Generator().manual_seed(seed + 1000 * layer))

draws on a CPU, reproduced here without torch: the same 32-bit Mersenne Twister stream, the same
24-bit uniforms, the same Box-Muller blocks (ATen ``normal_fill``).

``hadamard``: ``diag(s) H / sqrt(d)`` with the Sylvester matrix H and random signs s, the ones that
``torch.randint(0, 2, (d,)) * 2 - 1`` draws from a generator seeded ``seed + 1337 * layer``. Without
the signs a vector with a constant part would end up in a single coordinate.

The projection of ``prod`` is a Gaussian matrix S, drawn like that of ``qr`` from a seed between
those of two layers. It travels beside the rotation, as ``[R | S^T]``: one product with it brings a
query to where both the codes and the signs are (Johnson-Lindenstrauss, quantised to one bit: QJL).

What is baked into a model is what counts: nothing derives a rotation a second time.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.presets import DEFAULT_SEED, HADAMARD, MAX_SEED, QR, ROTATIONS
from tq_onnx.codec.spec import Codec
from tq_onnx.errors import UsageError

_LAYER_STRIDE: Final = {QR: 1000, HADAMARD: 1337}
_SKETCH_SEED: Final = 500

_BLOCK: Final = 16
"""Box-Muller turns 16 uniforms at a time into 16 normals."""


def rotation_seed(kind: str, layer: int, seed: int = DEFAULT_SEED) -> int:
    """Return the seed of one layer's rotation."""
    _check_kind(kind)
    return seed + _LAYER_STRIDE[kind] * layer


def make_rotation(
    kind: str, head_size: int, layer: int, seed: int = DEFAULT_SEED
) -> npt.NDArray[np.float32]:
    """Return the rotation of one layer.

    Args:
        kind: ``qr`` or ``hadamard``.
        head_size: D, a multiple of 4; for ``hadamard`` a power of two.
        layer: index of the layer.
        seed: base seed of the model.

    Returns:
        float32 ``[D, D]``, orthogonal to float32 rounding.

    Raises:
        UsageError: the kind is not known, or has no matrix of this size.
    """
    own_seed = rotation_seed(kind, layer, seed)
    return _qr(head_size, own_seed) if kind == QR else _hadamard(head_size, own_seed)


def make_sketch(head_size: int, layer: int, seed: int = DEFAULT_SEED) -> npt.NDArray[np.float32]:
    """Return the random projection of one layer, standard normal entries.

    Returns:
        S, float32 ``[D, D]``; the signs come from ``S r``.
    """
    own_seed = seed + _LAYER_STRIDE[QR] * layer + _SKETCH_SEED
    return _randn(head_size * head_size, own_seed).reshape(head_size, head_size)


def rotation_of(
    codec: Codec, kind: str, head_size: int, layer: int, seed: int = DEFAULT_SEED
) -> npt.NDArray[np.float32]:
    """Return the rotation of one cache as the operators take it.

    Args:
        codec: a codec that rotates.
        kind: as for ``make_rotation``.
        head_size: likewise.
        layer: likewise.
        seed: likewise.

    Returns:
        float32 ``[D, C]``, C = ``codec.coordinates(D)``: R, for ``prod`` ``[R | S^T]``.
    """
    rotation = make_rotation(kind, head_size, layer, seed)
    if not codec.has_sketch:
        return rotation
    return np.concatenate([rotation, make_sketch(head_size, layer, seed).T], axis=1)


def _check_kind(kind: str) -> None:
    if kind not in ROTATIONS:
        raise UsageError(
            f"there is no rotation {kind!r}", fix=f"choose one of {', '.join(ROTATIONS)}"
        )


def _qr(size: int, seed: int) -> npt.NDArray[np.float32]:
    # float64 throughout: the last columns of Q lose digits in float32, and differently with every
    # LAPACK, whereas this rounds to the same float32 matrix almost everywhere.
    q, t = np.linalg.qr(_randn(size * size, seed).reshape(size, size).astype(np.float64))
    signs = np.where(np.diagonal(t) < 0, -1.0, 1.0)
    return np.asarray(q * signs, np.float32)


def _hadamard(size: int, seed: int) -> npt.NDArray[np.float32]:
    if size < 1 or size & (size - 1):
        raise UsageError(
            f"the hadamard rotation needs a head size that is a power of two, not {size}",
            fix="choose the qr rotation",
        )
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = 2.0 * (_mt19937(size, seed) & 1) - 1
    return np.asarray(signs[:, None] * matrix / np.sqrt(size), np.float32)


def _mt19937(count: int, seed: int) -> npt.NDArray[np.uint32]:
    """Return the raw 32-bit output of the Mersenne Twister after ``init_genrand(seed)``."""
    # RandomState, not Generator: its stream is frozen for good (NEP 19).
    state = np.random.RandomState(seed & MAX_SEED)
    return state.randint(0, 2**32, size=count, dtype=np.uint32)


def _randn(count: int, seed: int) -> npt.NDArray[np.float32]:
    """Return ``torch.randn(count)`` on a CPU, ``count`` a positive multiple of 16."""
    if count < _BLOCK or count % _BLOCK:
        raise ValueError(f"{count} normals cannot be drawn: not a positive multiple of {_BLOCK}")
    uniform = (_mt19937(count, seed) & 0xFF_FFFF) * np.float32(2.0**-24)
    blocks = uniform.astype(np.float32).reshape(-1, 2, _BLOCK // 2)
    # 1 - u keeps the logarithm away from 0: u lies in [0, 1).
    radius = np.sqrt(np.float32(-2) * np.log(np.float32(1) - blocks[:, 0]))
    angle = np.float32(2 * np.pi) * blocks[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
