"""Makes the frozen vectors of this folder; run it only when a stored byte is meant to change.

    python -m tests.golden.make_golden rows        codec_rows.npz: vectors and their rows (numpy)
    python -m tests.golden.make_golden integers    integer_rows.npz: those of codebooks of integers
    python -m tests.golden.make_golden rotations   rotations_torch.json: what torch draws (torch)

Rows are chosen with a margin: no rotated coordinate lies near a boundary and no scale near a tie of
float16 rounding, so that every correct implementation must give exactly these bytes.

There are three sets. ``vectors_D`` came with ``lloyd_max`` 2 to 4 and ``raw``, whose rows have not
changed since the first version: they have its centroids, which were not rounded, as have the models
of that time. ``kinds_vectors_D`` are for the kinds that do not rotate, with vectors for which they
have their margin; ``integer_rows.npz`` has those that rotate.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from tests.codec.theory import unrounded
from tq_onnx.codec import fp8, reference
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.elements import ELEMENT_BITS
from tq_onnx.codec.kind import UNBIASED
from tq_onnx.codec.presets import QR
from tq_onnx.codec.quantise import quantise
from tq_onnx.codec.rotated import LLOYD_MAX, PROD, rotate
from tq_onnx.codec.rotation import make_rotation, rotation_of, rotation_seed
from tq_onnx.codec.search import SIGNED_GAINS, gain_table
from tq_onnx.codec.spec import CODECS, Codec, row_layout
from tq_onnx.codec.unrotated import FP8, Q8_0, Q8_0_BLOCK, RAW, UNIFORM

FOLDER = Path(__file__).parent
HEAD_SIZES = (64, 128)
FIRST_BITS = (2, 3, 4)
KIND_HEAD_SIZES = (64, 80, 128)
KINDS = [codec for codec in CODECS if not (codec.is_raw or codec.is_signed)]
UNROTATED = [codec for codec in KINDS if not codec.is_rotated]
ROW_COUNT = 8
KIND_ROW_COUNT = 5
BOUNDARY_MARGIN = 2e-5
KIND_MARGIN = 2e-6
SCALE_MARGIN = 0.05
STEP_MARGIN = 1e-3
ROTATIONS = ((64, 0), (64, 1), (64, 27), (80, 0), (128, 0), (128, 1), (128, 35), (256, 2))


def has_margin(vector: np.ndarray) -> bool:
    """Whether rounding in float32 cannot change any byte of the vector's first rows."""
    head_size = len(vector)
    norm, y = rotate(vector, make_rotation(QR, head_size, 0))
    for bits in FIRST_BITS:
        book = unrounded(bits, head_size)
        if np.abs(y[:, None] - book.boundaries.astype(np.float64)).min() < BOUNDARY_MARGIN:
            return False
        codes = np.searchsorted(book.boundaries, y, side="right")
        scale = norm / np.linalg.norm(book.centroids[codes].astype(np.float64))
        if not half_has_margin(scale):
            return False
    return True


def half_has_margin(values: np.ndarray) -> bool:
    """Whether numbers are not near a tie of rounding to float16."""
    steps = np.spacing(np.abs(values).astype(np.float16)).astype(np.float64)
    return bool((np.abs((np.abs(values) / steps) % 1 - 0.5) >= SCALE_MARGIN).all())


def kinds_have_margin(vector: np.ndarray, codecs: list[Codec]) -> bool:
    """Whether rounding in float32 cannot change any byte of any kind, but for a norm in float32."""
    return all(codec_has_margin(vector.astype(np.float64), codec) for codec in codecs)


def codec_has_margin(x: np.ndarray, codec: Codec) -> bool:
    """The same for one codec."""
    if codec.is_rotated:
        return rotated_has_margin(x, codec)
    if codec.kind == UNIFORM:
        low = x.min()
        scale = (x.max() - low) / (2**codec.bits - 1)
        fields = half_has_margin(np.array([scale, low]))
        return fields and steps_have_margin((x - low) / scale)
    if codec.kind == Q8_0:
        blocks = [x[at : at + Q8_0_BLOCK] for at in range(0, len(x), Q8_0_BLOCK)]
        scales = [np.abs(block).max() / 127 for block in blocks]
        return all(
            half_has_margin(scale) and steps_have_margin(block / scale)
            for block, scale in zip(blocks, scales, strict=True)
        )
    assert codec.kind == FP8
    return bool((fp8.encode(x * (1 - 1e-5)) == fp8.encode(x * (1 + 1e-5))).all())


def rotated_has_margin(x: np.ndarray, codec: Codec) -> bool:
    """The same for a codec that rotates."""
    rotation, book = rotation_of(codec, QR, len(x), 0), codebook_of(codec, len(x))
    norm, y = rotate(x, rotation[:, : len(x)])
    if np.abs(y[:, None] - book.boundaries.astype(np.float64)).min() < KIND_MARGIN:
        return False
    codes, fields = quantise(x, codec, rotation, book)
    centroids = book.centroids.astype(np.float64)[codes & (codec.levels - 1)]
    if codec.corrects_norm and not half_has_margin(norm / np.linalg.norm(centroids)):
        return False
    if codec.kind != PROD:
        return True
    residual = x - fields["scale"] * centroids @ rotation[:, : len(x)].T.astype(np.float64)
    seen = residual @ rotation[:, len(x) :].astype(np.float64)
    length = np.linalg.norm(residual)
    return bool(np.abs(seen).min() > STEP_MARGIN * length) and half_has_margin(length)


def steps_have_margin(steps: np.ndarray) -> bool:
    """Whether numbers are not near halves."""
    return bool((np.abs(steps % 1 - 0.5) >= STEP_MARGIN).all())


def make_rows() -> None:
    """Vectors of very different norms, and a zero vector, with their rows at every bit width."""
    arrays: dict[str, np.ndarray] = {}
    for head_size in HEAD_SIZES:
        random = np.random.RandomState(head_size)
        vectors: list[np.ndarray] = []
        while len(vectors) < ROW_COUNT - 1:
            vector = random.standard_normal(head_size) * 10.0 ** (len(vectors) - 3)
            vector = vector.astype(np.float32)
            if has_margin(vector):
                vectors.append(vector)
        vectors.append(np.zeros(head_size, np.float32))
        arrays[f"vectors_{head_size}"] = np.stack(vectors)
        for bits in FIRST_BITS:
            arrays[f"rows_{head_size}_{bits}"] = reference.encode(
                np.stack(vectors),
                Codec(LLOYD_MAX, bits),
                make_rotation(QR, head_size, 0),
                unrounded(bits, head_size),
            )
        for element, bits in ELEMENT_BITS.items():
            arrays[f"rows_{head_size}_{element}"] = reference.encode(
                np.stack(vectors), Codec(RAW, bits), None, None, element=element
            )
    for head_size in KIND_HEAD_SIZES:
        arrays |= make_kinds(head_size, UNROTATED)
    np.savez_compressed(FOLDER / "codec_rows.npz", **arrays)


def make_integers() -> None:
    """The rows of every kind that rotates, with codebooks of integers."""
    codecs, arrays = [codec for codec in KINDS if codec.is_rotated], {}
    for head_size in KIND_HEAD_SIZES:
        arrays |= make_kinds(head_size, codecs)
    np.savez_compressed(FOLDER / "integer_rows.npz", **arrays)


def make_signed() -> None:
    """Rows of integers of the vectors that ``integers`` chose, by the search of their presets."""
    arrays = {}
    gains = gain_table(SIGNED_GAINS, is_signed=True)
    with np.load(FOLDER / "integer_rows.npz") as integers:
        for head_size in KIND_HEAD_SIZES:
            vectors = integers[f"kinds_vectors_{head_size}"]
            for codec in (codec for codec in CODECS if codec.is_signed):
                tables = rotation_of(codec, QR, head_size, 0), codebook_of(codec, head_size)
                rows = reference.encode(vectors, codec, *tables, UNBIASED, gains=gains)
                arrays[f"{head_size}_{codec.bits}"] = rows
    np.savez_compressed(FOLDER / "signed_rows.npz", **arrays)


def make_kinds(head_size: int, codecs: list[Codec]) -> dict[str, np.ndarray]:
    """Vectors for which every kind has its margin, and their rows by ``kinds_D_KIND_BITS``."""
    random = np.random.RandomState(1000 + head_size)
    vectors: list[np.ndarray] = []
    while len(vectors) < KIND_ROW_COUNT - 1:
        vector = random.standard_normal(head_size) * 10.0 ** (len(vectors) - 1)
        vector = vector.astype(np.float32)
        if kinds_have_margin(vector, codecs):
            vectors.append(vector)
    x = np.stack([*vectors, np.zeros(head_size, np.float32)])
    arrays = {f"kinds_vectors_{head_size}": x}
    for codec in codecs:
        layout = row_layout(codec, head_size)
        tables = (
            (rotation_of(codec, QR, head_size, 0), codebook_of(codec, head_size))
            if codec.is_rotated
            else (None, None)
        )
        rows = reference.encode(x, codec, *tables)
        assert rows.shape[-1] == layout.row_bytes
        arrays[f"kinds_{head_size}_{codec.kind}_{codec.bits}"] = rows
    return arrays


def make_rotations() -> None:
    """Corners of what torch makes, and its product with a ramp, which sees every element."""
    import torch

    cases = []
    for head_size, layer in ROTATIONS:
        generator = torch.Generator().manual_seed(rotation_seed(QR, layer))
        normals = torch.randn(head_size, head_size, generator=generator)
        q, t = torch.linalg.qr(normals.double())
        matrix = (q * torch.sign(torch.diagonal(t))).numpy()
        cases.append(
            {
                "head_size": head_size,
                "layer": layer,
                "normals": normals[0, :16].tolist(),
                "first": matrix[0, :8].tolist(),
                "last": matrix[-1, -8:].tolist(),
                "ramp": (np.linspace(-1, 1, head_size) @ matrix).tolist(),
            }
        )
    document = {"torch": torch.__version__, "cases": cases}
    (FOLDER / "rotations_torch.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    makers = {
        "rows": make_rows,
        "integers": make_integers,
        "signed": make_signed,
        "rotations": make_rotations,
    }
    makers[sys.argv[1]]()
