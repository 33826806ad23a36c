"""Graph mode for the fake runtime: the graphs that the provider hands to CANN, run by the CPU.

CANN's parser and compiler are closed; what they are given is not. An engine keeps every model that
the provider hands over, checks that it is valid ONNX, and computes it with the CPU provider of the
same wheel, on the stream, from and to the device's memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from tests.cann.fake_acl import FakeAcl
from tests.cann.session import CPU, Array

_Compile = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p),
    *(ctypes.c_void_p, ctypes.c_size_t),
)
_Addresses = ctypes.POINTER(ctypes.c_void_p)
_Run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint32, _Addresses, _Addresses)


@dataclass
class Graph:
    """A graph as the provider handed it over.

    Attributes:
        model: valid ONNX.
        shapes: of its inputs, by name, as the provider told them.
        session: what computes it.
        runs: how often it ran.
    """

    model: onnx.ModelProto
    shapes: dict[str, tuple[int, ...]]
    session: ort.InferenceSession
    runs: int = 0

    @property
    def operators(self) -> set[str]:
        """Names of its operators."""
        return {node.op_type for node in self.model.graph.node}


class GraphEngine:
    """What compiles and runs graphs; use it inside ``with engine.installed(fake)``."""

    def __init__(self) -> None:
        self.graphs: dict[int, Graph] = {}
        self.errors: list[Exception] = []
        self._callbacks = (_Compile(self._compile), _Run(self._run))

    @contextmanager
    def installed(self, fake: FakeAcl) -> Iterator[GraphEngine]:
        """The fake runtime's graph mode, meanwhile; what went wrong in it is raised here."""
        install = fake.acl.fake_acl_set_graph_engine
        install.argtypes, install.restype = [ctypes.c_void_p] * 2, None
        install(*(ctypes.cast(callback, ctypes.c_void_p) for callback in self._callbacks))
        try:
            yield self
        finally:
            install(None, None)
        for error in self.errors:
            raise error

    @property
    def nodes(self) -> int:
        """Nodes of all graphs together."""
        return sum(len(graph.model.graph.node) for graph in self.graphs.values())

    def _compile(  # noqa: PLR0917 - the fake runtime calls it
        self, number: int, data: int, size: int, shapes: bytes, text: int, room: int
    ) -> int:
        try:
            model = onnx.load_model_from_string(ctypes.string_at(data, size))
            onnx.checker.check_model(model)
            graph = _compiled(model, _read_shapes(shapes.decode()))
            self.graphs[number] = graph
            described = _description(graph).encode() + b"\0"
            assert len(described) <= room
            ctypes.memmove(text, described, len(described))
        except Exception as error:
            self.errors.append(error)
            return 1
        return 0

    def _run(self, number: int, inputs: Any, outputs: Any) -> int:
        try:
            graph = self.graphs[number]
            feeds = {
                entry.name: _array(inputs[i], _numpy(entry.type), graph.shapes[entry.name])
                for i, entry in enumerate(graph.session.get_inputs())
            }
            for i, result in enumerate(graph.session.run(None, feeds)):
                _array(outputs[i], result.dtype, result.shape)[...] = result
            graph.runs += 1
        except Exception as error:
            self.errors.append(error)
            return 1
        return 0


def _read_shapes(text: str) -> dict[str, tuple[int, ...]]:
    """Shapes by name, of ``name:1,2;name:3``; names may have colons."""
    parts = [part.rpartition(":") for part in text.split(";") if part]
    return {name: tuple(int(size) for size in sizes.split(",")) for name, _, sizes in parts}


def _compiled(model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> Graph:
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for value in fixed.graph.input:
        shape = value.type.tensor_type.shape
        del shape.dim[:]
        for size in shapes[value.name]:
            shape.dim.add().dim_value = size
    # The provider says the newest version of the format that it knows, whatever the model needs.
    fixed.ir_version = 8
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(fixed.SerializeToString(), options, providers=[CPU])
    return Graph(model, shapes, session)


def _description(graph: Graph) -> str:
    """What the fake runtime must know: ``fake_acl.h``."""
    lines = []
    for entry in graph.session.get_inputs():
        count = int(np.prod(graph.shapes[entry.name], dtype=np.int64))
        lines.append(f"i {count * _numpy(entry.type).itemsize}")
    for entry in graph.session.get_outputs():
        shape = [size if isinstance(size, int) else -1 for size in entry.shape]
        size = int(np.prod(shape, dtype=np.int64)) if -1 not in shape else 0
        lines.append(" ".join(map(str, ["o", size * _numpy(entry.type).itemsize, *shape])))
    return "\n".join(lines) + "\n"


def _numpy(kind: str) -> np.dtype[Any]:
    """The element type of ``tensor(float)``."""
    name = kind.removeprefix("tensor(").rstrip(")")
    return np.dtype({"float": "float32", "double": "float64"}.get(name, name))


def _array(address: int | None, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Memory of the device as the host sees it."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = (ctypes.c_uint8 * size).from_address(address or 0)
    return np.frombuffer(buffer, dtype).reshape(shape)
