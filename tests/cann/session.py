"""Sessions of the real onnxruntime-cann wheel, and where their nodes ran."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
import onnx.parser
import onnxruntime as ort

Array = npt.NDArray[Any]

CANN = "CANNExecutionProvider"
CPU = "CPUExecutionProvider"

#: Single operators instead of whole graphs, and no files in the working directory.
OPTIONS = {"enable_cann_graph": "0", "dump_om_model": "0"}

#: Floating-point types as a profile names them.
FLOATS = frozenset({"float", "float16", "bfloat16", "double"})


def model_of(
    text: str, constants: Mapping[str, Array] | None = None, opset: int = 18, *, ours: bool = False
) -> bytes:
    """A model from ONNX's text of a graph; nodes are named after their outputs.

    It is checked, unless it has operators of ``ours``.
    """
    domain = ', "ai.turboquant" : 1' if ours else ""
    header = f'<ir_version: 9, opset_import: ["" : {opset}{domain}]> graph '
    model = onnx.parser.parse_model(header + text)
    for name, array in (constants or {}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for node in model.graph.node:
        node.name = node.output[0]
    if not ours:
        onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


@dataclass(frozen=True)
class PlacedNode:
    """A node as it ran, copies between the providers included.

    Attributes:
        name: of the node.
        op: its operator.
        provider: that ran it.
        is_float: whether an output is of floating-point numbers.
    """

    name: str
    op: str
    provider: str
    is_float: bool


class CannSession:
    """A session that must have the provider; its nodes are profiled.

    The model is its bytes, or the path of a file with external data.
    """

    def __init__(
        self,
        model: bytes | str,
        folder: Path,
        disabled: Sequence[str] = (),
        library: Path | None = None,
    ) -> None:
        options = ort.SessionOptions()
        if library is not None:
            options.register_custom_ops_library(str(library))
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        self.session = ort.InferenceSession(
            model, options, providers=[(CANN, OPTIONS), CPU], disabled_optimizers=list(disabled)
        )
        # Without CANN's libraries the session is one of the CPU, with a warning only.
        assert self.session.get_providers() == [CANN, CPU]

    def run(self, feeds: dict[str, Array]) -> list[Array]:
        return list(self.session.run(None, feeds))

    def end(self) -> list[PlacedNode]:
        """Ends the profile: every node that ran, each once."""
        file = Path(self.session.end_profiling())
        found = {}
        for event in json.loads(file.read_text()):
            name, is_kernel, _ = event["name"].partition("_kernel_time")
            if event.get("cat") != "Node" or not is_kernel:
                continue
            given = event["args"]
            types = {kind for output in given["output_type_shape"] for kind in output}
            found[name] = PlacedNode(
                name, given["op_name"], given["provider"], not types.isdisjoint(FLOATS)
            )
        return list(found.values())


def on_cpu(model: bytes, feeds: dict[str, Array], library: Path | None = None) -> list[Array]:
    """What the CPU provider of the same wheel gives."""
    options = ort.SessionOptions()
    if library is not None:
        options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(model, options, providers=[CPU])
    return [np.asarray(output) for output in session.run(None, feeds)]
