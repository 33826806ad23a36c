"""Makes the frozen vectors of this folder; run it only when a stored byte is meant to change.

    python tests/golden/make_golden.py rows        codec_rows.npz: vectors and their rows (numpy)
    python tests/golden/make_golden.py rotations   rotations_torch.json: what torch draws (torch)

Rows are chosen with a margin: no rotated coordinate lies near a boundary and no scale near a tie of
float16 rounding, so that every correct implementation must give exactly these bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from tq_onnx.codec import reference
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.elements import ELEMENT_BITS
from tq_onnx.codec.presets import QR
from tq_onnx.codec.rotation import make_rotation, rotation_seed
from tq_onnx.codec.spec import LLOYD_MAX, LLOYD_MAX_BITS, RAW, Codec

FOLDER = Path(__file__).parent
HEAD_SIZES = (64, 128)
ROW_COUNT = 8
BOUNDARY_MARGIN = 2e-5
SCALE_MARGIN = 0.05
ROTATIONS = ((64, 0), (64, 1), (64, 27), (80, 0), (128, 0), (128, 1), (128, 35), (256, 2))


def has_margin(vector: np.ndarray) -> bool:
    """Whether rounding in float32 cannot change any byte of the vector's rows."""
    head_size = len(vector)
    norm, y = reference.rotate(vector, make_rotation(QR, head_size, 0))
    for bits in LLOYD_MAX_BITS:
        book = lloyd_max(bits, head_size)
        if np.abs(y[:, None] - book.boundaries.astype(np.float64)).min() < BOUNDARY_MARGIN:
            return False
        codes = np.searchsorted(book.boundaries, y, side="right")
        scale = norm / np.linalg.norm(book.centroids[codes].astype(np.float64))
        step = float(np.spacing(np.float16(scale)))
        if abs((scale / step) % 1 - 0.5) < SCALE_MARGIN:
            return False
    return True


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
        for bits in LLOYD_MAX_BITS:
            arrays[f"rows_{head_size}_{bits}"] = reference.encode(
                np.stack(vectors),
                Codec(LLOYD_MAX, bits),
                make_rotation(QR, head_size, 0),
                lloyd_max(bits, head_size),
            )
        for element, bits in ELEMENT_BITS.items():
            arrays[f"rows_{head_size}_{element}"] = reference.encode(
                np.stack(vectors), Codec(RAW, bits), None, None, element=element
            )
    np.savez_compressed(FOLDER / "codec_rows.npz", **arrays)


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
    {"rows": make_rows, "rotations": make_rotations}[sys.argv[1]]()
