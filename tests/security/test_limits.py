"""Memory and time of the commands have bounds, whatever a file of less than 100 MB declares."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.cli.run import run
from tests.files.models import inline

MOST_BYTES = 2 << 30
MOST_SECONDS = 300
_LIMITED = (
    "import resource, sys\n"
    "resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)\n"
    "from tq_onnx.cli.main import main\n"
    "main(sys.argv[2:])\n"
)


def weights(proto: onnx.ModelProto) -> None:
    """90 MB of weights inside."""
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros(90_000_000, np.uint8), "loot"))


def nodes(proto: onnx.ModelProto) -> None:
    for _ in range(100_001):
        proto.graph.node.add(op_type="Identity")


def initializers(proto: onnx.ModelProto) -> None:
    for _ in range(100_001):
        proto.graph.initializer.add()


def numbers(proto: onnx.ModelProto) -> None:
    node = proto.graph.node.add(op_type="Constant", output=["loot"])
    attribute = node.attribute.add(name="value_ints", type=onnx.AttributeProto.INTS)
    attribute.ints.extend([1] * 8_000_001)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (nodes, "nodes, and 100000 is the most"),
        (initializers, "initializers, and 100000 is the most"),
        (numbers, "numbers in attributes, and 8000000 is the most"),
    ],
)
def test_graphs_of_too_many_parts(
    edit: Callable[[onnx.ModelProto], None], says: str, tmp_path: Path
) -> None:
    path = inline(tmp_path)
    proto = onnx.load(path)
    edit(proto)
    path.write_bytes(proto.SerializeToString())
    for command in ("inspect", "convert"):
        assert says in run(command, path).sentence(4)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits of memory")
def test_a_large_file_needs_less_than_the_limits(tmp_path: Path) -> None:
    path = inline(tmp_path)
    proto = onnx.load(path)
    weights(proto)
    path.write_bytes(proto.SerializeToString())
    for arguments in (("inspect", path), ("convert", path, "-o", tmp_path / "out.onnx")):
        done = subprocess.run(
            [sys.executable, "-c", _LIMITED, str(MOST_BYTES), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_a_list_without_end_is_not_followed(tmp_path: Path) -> None:
    """Nor is memory taken for it: it would be hundreds of gigabytes."""
    path = inline(tmp_path)
    proto = onnx.load(path)
    graph = proto.graph
    for values, name, size in ((graph.input, "list", 36), (graph.output, "lists", 37)):
        kind = values.add(name=name).type.tensor_type
        kind.elem_type = onnx.TensorProto.INT64
        kind.shape.dim.add(dim_value=1 << size)
    node = proto.graph.node.add(op_type="Concat", input=["list", "list"], output=["lists"])
    node.attribute.add(name="axis", type=onnx.AttributeProto.INT, i=0)
    path.write_bytes(proto.SerializeToString())
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(MOST_BYTES), "inspect", str(path)],
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    assert done.returncode in (0, 3, 4), done.stderr
