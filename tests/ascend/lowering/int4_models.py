"""An int4 export of onnxruntime-genai's builder in other sizes, its weights in a sparse data file.

  python -m tests.ascend.lowering.int4_models FOLDER --hidden 5120 --wide 17408 --vocabulary 151936

writes one and converts it for CANN with ``--expand-weights float16``; prints seconds, megabytes of
memory at most, and bytes written. The defaults are a small form.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir

from tq_onnx.api.converting import convert
from tq_onnx.graph.constants import attribute_int

FIXTURE = Path(__file__).parents[2] / "fixtures" / "genai-cpu-int4-hd128.onnx"
HIDDEN, WIDE, VOCABULARY = 32, 48, 97
"""Sizes of the fixture."""


def write(folder: Path, hidden: int, wide: int, vocabulary: int) -> Path:
    """Write the model; all weights that have these sizes are zeros in a file without content."""
    model = ir.load(FIXTURE)
    new = {HIDDEN: hidden, WIDE: wide, VOCABULARY: vocabulary, HIDDEN // 2: hidden // 2}
    folder.mkdir(parents=True, exist_ok=True)
    place = 0
    for node in model.graph:
        if node.op_type != "MatMulNBits":
            continue
        rows, columns = (new.get(n, n) for n in (attribute_int(node, name, 0) for name in "KN"))
        node.attributes["K"] = ir.AttrInt64("K", rows)
        node.attributes["N"] = ir.AttrInt64("N", columns)
        blocks = rows // attribute_int(node, "block_size", 0)
        for value, shape in zip(
            node.inputs[1:3], ((columns, blocks, 16), (columns, blocks)), strict=True
        ):
            assert value is not None
            place = _move(value, shape, place, folder)
    for value in model.graph.initializers.values():
        if value.shape is not None and value.shape.numpy() == (HIDDEN,):
            _fill(value, np.ones(hidden, np.float32))
    for node in model.graph:
        if node.op_type == "Constant":
            tensor = node.attributes["value"].as_tensor()
            if tensor.numpy().tolist() == [VOCABULARY, HIDDEN // 2]:
                table = np.array([vocabulary, hidden // 2])
                node.attributes["value"] = ir.AttrTensor("value", ir.tensor(table))
    for value in (*model.graph.outputs, *(v for node in model.graph for v in node.outputs)):
        if value.shape is not None:
            sizes = [new.get(d, d) if isinstance(d, int) else d for d in value.shape]
            value.shape = ir.Shape(sizes)
    with (folder / "model.onnx.data").open("wb") as data:
        data.truncate(place)
    ir.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def _move(value: ir.Value, shape: tuple[int, ...], place: int, folder: Path) -> int:
    dtype = value.dtype
    assert dtype is not None
    size = int(np.prod(shape)) * dtype.itemsize
    value.shape = ir.Shape(shape)
    value.const_value = ir.ExternalTensor(
        "model.onnx.data", place, int(size), dtype,
        shape=ir.Shape(shape), name=value.name or "", base_dir=folder,
    )  # fmt: skip
    return place + int(size)


def _fill(value: ir.Value, array: np.ndarray) -> None:
    value.const_value = ir.tensor(array, name=value.name)
    value.shape = ir.Shape(array.shape)


def peak() -> int:
    """The most bytes of memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--wide", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=100_000)
    given = parser.parse_args()
    model = write(given.folder, given.hidden, given.wide, given.vocabulary)
    # What a conversion takes at all: imports, and a model that is small.
    convert(FIXTURE, given.folder / "first.onnx", target="cann", expand_weights="float16")
    before, began = peak(), time.monotonic()
    report = convert(
        model, given.folder / "out" / "model.onnx", target="cann", expand_weights="float16"
    )
    print(
        json.dumps(
            {
                "seconds": round(time.monotonic() - began, 1),
                "peak_mb": peak() >> 20,
                "more_mb": (peak() - before) >> 20,
                "written_mb": report.files.bytes_written >> 20,
            }
        )
    )


if __name__ == "__main__":
    main()
