"""The lane of values: exports that compute something else, converted and verified.

A conversion with the preset ``raw`` changes no number. So where an edited export still runs, and is
converted, ``verify`` must find no difference: one is a wrong conversion or a false alarm.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnx.shape_inference

from tests.fuzz import model
from tests.fuzz.commands import Case
from tests.fuzz.rewiring import EDITS
from tq_onnx.errors import TqOnnxError
from tq_onnx.runtime.opening import open_original

NOT_ON_CPU: Final = (
    *("dynamo-op18-sdpa-bf16", "genai-cuda-fp16", "genai-cuda-int4", "genai-webgpu-fp16"),
    *("genai-cpu-fp16", "dynamo-op18-sdpa-hd128-fp16", "legacy-op17-sdpa-fp16"),
)
"""Or of so few digits that an edit may show none."""
EXPORTS: Final = [name for name in model.EXPORTS if name not in NOT_ON_CPU]
CODES: Final = (0, 2, 3, 4)
"""Some edits leave a model that takes no text, or that onnxruntime does not run."""


def check(draw: random.Random, folder: Path) -> Case:
    """Edits an export; converts and verifies it."""
    case = Case(folder)
    name = draw.choice(EXPORTS)
    proto = onnx.load_from_string(inferred(name))
    edits = [draw.choice(EDITS) for _ in range(draw.choice((1, 1, 2)))]
    for edit in edits:
        edit(proto, draw)
    case.what = f"{name}: {', '.join(edit.__name__ for edit in edits)}"
    # What was inferred of the graph before is not true of this one.
    del proto.graph.value_info[:]
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    output = folder / "converted.onnx"
    if case.run("convert", path, "--preset", "raw", "-o", output).code == 0:
        done = case.run("verify", path, output, "--threads", 1, codes=(*CODES, 5))
        if done.code == 5 and not _reads_as_one(path):
            case.outcomes["verify"] = "5, of an odd original"
        elif done.code == 5:
            failed = [line for line in done.out.splitlines() if "FAIL" in line.upper()]
            case.broken("wrong", f"verify: {done.err.strip()[:300]} {failed[:3]}")
    return case


def _reads_as_one(path: Path) -> bool:
    """Whether the original runs, and reads a text in parts as it reads it at once.

    Some edits leave a model that does not: verify then compares what nobody could use.
    """
    try:
        opened = open_original(path, threads=1)
        tokens = np.arange(3, 15)[None]
        whole = opened.decoder().prefill(tokens).astype(np.float64)
        parts = opened.decoder().prefill(tokens, chunk=5).astype(np.float64)
    except TqOnnxError:
        return False
    if not np.isfinite(whole).all():
        return False
    rows = min(whole.shape[1], parts.shape[1])
    error = np.abs(whole[:, -rows:] - parts[:, -rows:]).max()
    return bool(error <= 1e-3 * np.abs(whole).max())


def warm() -> None:
    """Makes what all cases share."""
    for name in EXPORTS:
        inferred(name)


@cache
def inferred(name: str) -> bytes:
    """An export whose values have shapes, so that edits find some that are alike."""
    proto = onnx.load_from_string(model.export(name))
    return onnx.shape_inference.infer_shapes(proto, data_prop=True).SerializeToString()
