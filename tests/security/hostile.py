"""A folder of hostile files, built by this script.

Each builder makes one model in a folder of its own and returns its path; ``HOSTILE`` tells the exit
code and what the one sentence on stderr must mention.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx

from tests.files.models import DYNAMO, FIXTURES, external, inline, point

Build = Callable[[Path], Path]


@dataclass(frozen=True)
class Hostile:
    build: Build
    says: str
    code: int = 4
    may_hang: bool = False


def content(data: bytes, name: str = "model.onnx") -> Build:
    def build(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(data)
        return path

    return build


def edited(edit: Callable[[onnx.ModelProto], None]) -> Build:
    """A real export with something changed; weights inside."""

    def build(folder: Path) -> Path:
        path = inline(folder)
        proto = onnx.load(path)
        edit(proto)
        path.write_bytes(proto.SerializeToString())
        return path

    return build


def weight(edit: Callable[[onnx.TensorProto], None]) -> Build:
    """A real export whose first large weight is changed."""

    def change(proto: onnx.ModelProto) -> None:
        edit(next(t for t in proto.graph.initializer if len(t.raw_data) >= 1024))

    return edited(change)


def beside(location: str, offset: object = 0, length: object = 4096, size: int = 8192) -> Build:
    """A real export with one external weight of 4096 bytes, and a data file of ``size`` bytes."""

    def build(folder: Path) -> Path:
        (folder / "weights.data").write_bytes(b"\0" * size)
        path = inline(folder)
        proto = onnx.load(path)
        add_external(proto, location, offset, length)
        path.write_bytes(proto.SerializeToString())
        return path

    return build


def add_external(proto: onnx.ModelProto, location: str, offset: object, length: object) -> None:
    tensor = proto.graph.initializer.add()
    tensor.name = "loot"
    tensor.data_type = onnx.TensorProto.FLOAT
    tensor.dims.append(1024)
    point(tensor, location, offset, length)


def linked(target: str) -> Build:
    """External data that is a symbolic link."""

    def build(folder: Path) -> Path:
        (folder.parent / "secret.bin").write_bytes(b"s" * 8192)
        path = beside("link.data")(folder)
        (folder / "link.data").symlink_to(target)
        return path

    return build


def linked_folder(folder: Path) -> Path:
    """External data below a link to a folder outside."""
    outside = folder.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "weights.data").write_bytes(b"s" * 8192)
    (folder / "sub").symlink_to(outside)
    return beside("sub/weights.data")(folder)


def pipe_as_model(folder: Path) -> Path:
    os.mkfifo(folder / "model.onnx")
    return folder / "model.onnx"


def pipe_as_data(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.data")
    return beside("pipe.data")(folder)


def link_to_itself(folder: Path) -> Path:
    (folder / "model.onnx").symlink_to("model.onnx")
    return folder / "model.onnx"


def missing_data(folder: Path) -> Path:
    path = external(folder)
    (folder / "model.onnx.data").unlink()
    return path


def folder_as_data(folder: Path) -> Path:
    (folder / "folder.data").mkdir()
    return beside("folder.data")(folder)


def dims(*sizes: int) -> Callable[[onnx.TensorProto], None]:
    def edit(tensor: onnx.TensorProto) -> None:
        del tensor.dims[:]
        tensor.dims.extend(sizes)

    return edit


def element_type(number: int) -> Callable[[onnx.TensorProto], None]:
    def edit(tensor: onnx.TensorProto) -> None:
        tensor.data_type = number

    return edit


def promised(tensor: onnx.TensorProto) -> None:
    """4 TiB declared, nothing there."""
    dims(1 << 20, 1 << 20)(tensor)
    tensor.ClearField("raw_data")


def negative_input(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -3


def endless_input(proto: onnx.ModelProto) -> None:
    proto.graph.input[-1].type.tensor_type.shape.dim[2].dim_value = 1 << 62


def endless_value(size: int) -> Callable[[onnx.ModelProto], None]:
    """A declared dimension between the nodes."""

    def edit(proto: onnx.ModelProto) -> None:
        proto.graph.value_info[0].type.tensor_type.shape.dim.add(dim_value=size)

    return edit


def endless_sizes(op_type: str, slot: int, size: int) -> Callable[[onnx.ModelProto], None]:
    """A list of sizes so long that no shape has so many dimensions."""

    def edit(proto: onnx.ModelProto) -> None:
        kind = proto.graph.input.add(name="sizes").type.tensor_type
        kind.elem_type = onnx.TensorProto.INT64
        kind.shape.dim.add(dim_value=size)
        inputs = ["sizes"] if slot == 0 else ["input_ids", *["sizes"] * slot]
        proto.graph.node.add(op_type=op_type, input=inputs, output=["made"])

    return edit


def many_elements(proto: onnx.ModelProto) -> None:
    shape = proto.graph.value_info[0].type.tensor_type.shape
    shape.ClearField("dim")
    for _ in range(4):
        shape.dim.add(dim_value=1 << 30)


def many_dimensions(proto: onnx.ModelProto) -> None:
    shape = proto.graph.value_info[0].type.tensor_type.shape
    for _ in range(1000):
        shape.dim.add(dim_value=1)


def in_a_branch(edit: Callable[[onnx.GraphProto], None]) -> Callable[[onnx.ModelProto], None]:
    """A change inside a subgraph."""

    def change(proto: onnx.ModelProto) -> None:
        node = proto.graph.node.add(op_type="If", name="branch")
        node.input.append("input_ids")
        edit(node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g)

    return change


def endless_inside(graph: onnx.GraphProto) -> None:
    inner = graph.value_info.add(name="inner").type.tensor_type
    inner.elem_type = onnx.TensorProto.FLOAT
    inner.shape.dim.add(dim_value=1 << 50)


def version(number: int, domain: str = "") -> Callable[[onnx.ModelProto], None]:
    def edit(proto: onnx.ModelProto) -> None:
        proto.opset_import.add(domain=domain, version=number)

    return edit


def no_operands(proto: onnx.ModelProto) -> None:
    next(node for node in proto.graph.node if node.op_type == "Softmax").ClearField("input")


def no_results(proto: onnx.ModelProto) -> None:
    next(node for node in proto.graph.node if node.op_type == "Mul").ClearField("output")


def no_utf8(folder: Path) -> Path:
    """A name of the right length, of bytes that are no text."""
    path = inline(folder)
    path.write_bytes(path.read_bytes().replace(b"position_ids", b"position\xff\xfe\xfdx"))
    return path


def in_a_subgraph(proto: onnx.ModelProto) -> None:
    node = proto.graph.node.add(op_type="If", name="branch")
    node.input.append("input_ids")
    branch = node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
    tensor = branch.initializer.add(name="loot", data_type=onnx.TensorProto.FLOAT)
    tensor.dims.append(1024)
    point(tensor, "../secret.bin", 0, 4096)


def in_an_attribute(proto: onnx.ModelProto) -> None:
    node = proto.graph.node.add(op_type="Constant", name="constant")
    node.output.append("loot")
    tensor = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t
    tensor.data_type = onnx.TensorProto.FLOAT
    tensor.dims.append(1024)
    point(tensor, "../secret.bin", 0, 4096)


def in_a_function(proto: onnx.ModelProto) -> None:
    function = proto.functions.add(name="f", domain="d")
    node = function.node.add(op_type="Constant", name="constant")
    node.output.append("loot")
    tensor = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t
    tensor.data_type = onnx.TensorProto.FLOAT
    tensor.dims.append(1024)
    point(tensor, "/etc/passwd", 0, 4096)


def nested(depth: int) -> Callable[[onnx.ModelProto], None]:
    def edit(proto: onnx.ModelProto) -> None:
        graph = proto.graph
        for _ in range(depth):
            node = graph.node.add(op_type="If", name="deeper")
            node.input.append("input_ids")
            graph = node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
            graph.name = "inner"

    return edit


def no_graph(proto: onnx.ModelProto) -> None:
    proto.ClearField("graph")


def no_nodes(proto: onnx.ModelProto) -> None:
    del proto.graph.node[:]


def no_opset(proto: onnx.ModelProto) -> None:
    del proto.opset_import[:]


def cycle(proto: onnx.ModelProto) -> None:
    matmul = next(node for node in proto.graph.node if node.op_type == "MatMul")
    matmul.input[0] = matmul.output[0]


def half_a_product(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        if node.op_type in ("Mul", "Add"):
            del node.input[1:]


def twice(proto: onnx.ModelProto) -> None:
    proto.graph.node.add().CopyFrom(proto.graph.node[-1])


def _export() -> bytes:
    return (FIXTURES / f"{DYNAMO}.onnx").read_bytes()


LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)

HOSTILE: dict[str, Hostile] = {
    "no bytes": Hostile(content(b""), "empty"),
    "text": Hostile(content(b"This is a shopping list: eggs, milk.\n" * 20), "text file"),
    "web page": Hostile(content(b"<!DOCTYPE html>\n<html><body>404</body></html>"), "web page"),
    "lfs pointer": Hostile(content(LFS), "git lfs pull"),
    "gguf": Hostile(content(b"GGUF\x03\0\0\0" + bytes(64)), "GGUF"),
    "zip": Hostile(content(b"PK\x03\x04" + bytes(range(64))), "zip"),
    "safetensors": Hostile(
        content(b"\x40\0\0\0\0\0\0\0" + b'{"a": {"dtype": "F32"}}'), "safetensors"
    ),
    "noise": Hostile(content(bytes((i * 97 + 31) % 256 for i in range(4096))), "not an ONNX model"),
    "zeros": Hostile(content(bytes(4096)), "not an ONNX model"),
    "cut short": Hostile(content(_export()[:100_000]), "cut short"),
    "cut to a header": Hostile(content(_export()[:12]), "not an ONNX model"),
    "no graph": Hostile(edited(no_graph), "not an ONNX model"),
    "no nodes": Hostile(edited(no_nodes), "empty"),
    "no opset": Hostile(edited(no_opset), "opset"),
    "pipe": Hostile(pipe_as_model, "not a regular file", may_hang=True),
    "link to itself": Hostile(link_to_itself, "cannot be read"),
    "too deep for protobuf": Hostile(edited(nested(200)), "not an ONNX model"),
    "negative dims": Hostile(weight(dims(-1, 64)), "negative dimensions"),
    "negative dims that cancel": Hostile(weight(dims(-32, -64)), "negative dimensions"),
    "4 TiB declared": Hostile(weight(promised), "holds 0"),
    "huge dims": Hostile(weight(dims(1 << 62, 1 << 62, 1 << 62)), "instead of"),
    "short weights": Hostile(weight(dims(7)), "instead of 28"),
    "unknown element type": Hostile(weight(element_type(99)), "element type 99"),
    "no element type": Hostile(weight(element_type(0)), "element type 0"),
    "negative input": Hostile(edited(negative_input), "dimension of -3"),
    "endless input": Hostile(edited(endless_input), f"dimension of {1 << 62}"),
    "endless value": Hostile(edited(endless_value((1 << 63) - 1)), f"dimension of {(1 << 63) - 1}"),
    "negative value": Hostile(edited(endless_value(-1)), "dimension of -1"),
    "endless value inside": Hostile(edited(in_a_branch(endless_inside)), f"dimension of {1 << 50}"),
    "endless list of sizes": Hostile(
        edited(endless_sizes("ConstantOfShape", 0, 1 << 36)), f"have {1 << 36} numbers"
    ),
    "endless target": Hostile(edited(endless_sizes("Expand", 1, 1 << 36)), "takes a list of sizes"),
    "more elements than memory": Hostile(edited(many_elements), "no memory holds"),
    "a thousand dimensions": Hostile(edited(many_dimensions), "64 is the most"),
    "opset beyond int32": Hostile(edited(version(1 << 40)), f"version {1 << 40}"),
    "negative opset": Hostile(edited(version(-1, "com.microsoft")), "version -1"),
    "node without inputs": Hostile(edited(no_operands), "not a valid model"),
    "node without outputs": Hostile(edited(no_results), "not a valid model"),
    "names that are no text": Hostile(no_utf8, "not a valid model"),
    "missing data": Hostile(missing_data, "model.onnx.data"),
    "data in the parent": Hostile(beside("../secret.bin"), "outside"),
    "data by a detour": Hostile(beside("a/../../secret.bin"), "outside"),
    "data in the folder itself": Hostile(beside("."), "outside"),
    "absolute data": Hostile(beside("/etc/passwd"), "absolute"),
    "absolute data on windows": Hostile(beside("C:\\secret.bin"), "absolute"),
    "data on a share": Hostile(beside("\\\\host\\secret.bin"), "absolute"),
    "nameless data": Hostile(beside(""), "without a file name"),
    "data with a zero byte": Hostile(beside("a\0b"), "without a file name"),
    "data behind a link": Hostile(linked("../secret.bin"), "outside"),
    "data behind an absolute link": Hostile(linked("/etc/passwd"), "outside"),
    "data behind a device link": Hostile(linked("/dev/zero"), "outside"),
    "data behind a dead link": Hostile(linked("nowhere"), "missing"),
    "data behind a linked folder": Hostile(linked_folder, "outside"),
    "pipe as data": Hostile(pipe_as_data, "not a regular file", may_hang=True),
    "folder as data": Hostile(folder_as_data, "not a regular file"),
    "data too short": Hostile(beside("weights.data", size=4095), "too short"),
    "data past the end": Hostile(beside("weights.data", offset=8192), "too short"),
    "offset that overflows": Hostile(beside("weights.data", offset=(1 << 63) - 1), "too short"),
    "negative offset": Hostile(beside("weights.data", offset=-4096), "offset"),
    "offset of words": Hostile(beside("weights.data", offset="many"), "offset"),
    "endless offset": Hostile(beside("weights.data", offset="9" * 5000), "offset"),
    "length below the type": Hostile(beside("weights.data", length=8), "gives it 8"),
    "data of a subgraph": Hostile(edited(in_a_subgraph), "outside"),
    "data of an attribute": Hostile(edited(in_an_attribute), "outside"),
    "data of a function": Hostile(edited(in_a_function), "absolute"),
}

ODD: dict[str, Build] = {
    "deep but readable": edited(nested(20)),
    "a cycle": edited(cycle),
    "a node twice": edited(twice),
    "operators without operands": edited(half_a_product),
}
"""Files that may pass or be refused, with one sentence, but do no harm."""
