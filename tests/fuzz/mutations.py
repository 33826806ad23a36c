"""Mutations of real exports, each by its number, and what the commands make of them.

``mutated(number)`` is the same bytes at every time. ``python -m tests.fuzz.mutations 0 5000`` runs
that many by hand, in this process, and prints the numbers of those that break a promise: an exit
code other than 0, 3 and 4, commands that do not agree, more than ``MOST_SECONDS`` or more memory
than ``MOST_BYTES``, control characters on the terminal.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx

from tests.cli.run import run
from tests.files.models import FIXTURES

BASES = (
    *("dynamo-op18-sdpa", "dynamo-op23-sdpa", "dynamo-op24-sdpa", "dynamo-qwen3-moe"),
    *("genai-cpu-int4", "genai-dml-fp16", "genai-cuda-fp16", "hf-decode", "hf-static-decode"),
    *("hf-ortcpu-prefill", "legacy-op14-eager", "mobius-default", "optimum"),
)
NUMBERS = (0, 1, -1, 2, 3, 7, 8, 64, 1 << 31, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, -(1 << 63))
MOST_SECONDS = 10.0
MOST_BYTES = 2 << 30

Edit = Callable[[onnx.ModelProto, random.Random], Any]


def _node(proto: onnx.ModelProto, draw: random.Random) -> onnx.NodeProto:
    return draw.choice(proto.graph.node)


def _value(proto: onnx.ModelProto, draw: random.Random) -> onnx.ValueInfoProto:
    graph = proto.graph
    kinds = [values for values in (graph.input, graph.output, graph.value_info) if values]
    return draw.choice(draw.choice(kinds))


def _drop(values: Any, draw: random.Random) -> None:
    if values:
        del values[draw.randrange(len(values))]


def drop_input(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = _node(proto, draw)
    if node.input:
        del node.input[draw.choice((-1, 0, draw.randrange(len(node.input)))) :]


def blank_input(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = _node(proto, draw)
    if node.input:
        node.input[draw.randrange(len(node.input))] = ""


def other_input(proto: onnx.ModelProto, draw: random.Random) -> None:
    node, other = _node(proto, draw), _node(proto, draw)
    names = [*other.output, *other.input, *(v.name for v in proto.graph.input), "nowhere"]
    if node.input:
        node.input[draw.randrange(len(node.input))] = draw.choice(names)


def more_inputs(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = _node(proto, draw)
    node.input.extend(draw.choices([*node.input, ""], k=draw.randrange(1, 4)))


def drop_output(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = _node(proto, draw)
    if node.output:
        del node.output[draw.choice((-1, 0)) :]


def rename_output(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = _node(proto, draw)
    if node.output:
        names = ["", "x", node.input[0] if node.input else "y", _node(proto, draw).output[:1]]
        name = draw.choice(names)
        node.output[draw.randrange(len(node.output))] = name if isinstance(name, str) else "z"


def drop_node(proto: onnx.ModelProto, draw: random.Random) -> None:
    _drop(proto.graph.node, draw)


def move_node(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = onnx.NodeProto()
    node.CopyFrom(_node(proto, draw))
    if draw.random() < 0.5:
        proto.graph.node.remove(node)
    proto.graph.node.insert(draw.randrange(len(proto.graph.node)), node)


def other_operator(proto: onnx.ModelProto, draw: random.Random) -> None:
    node, other = _node(proto, draw), _node(proto, draw)
    node.op_type = draw.choice((other.op_type, "Identity", "Softmax", "Nonsense", ""))
    if draw.random() < 0.3:
        node.domain = draw.choice(("", "ai.onnx", "com.microsoft", "tq", "tq_onnx", other.domain))


def drop_attribute(proto: onnx.ModelProto, draw: random.Random) -> None:
    nodes = [node for node in proto.graph.node if node.attribute]
    _drop(draw.choice(nodes).attribute, draw)


def change_attribute(proto: onnx.ModelProto, draw: random.Random) -> None:
    nodes = [node for node in proto.graph.node if node.attribute]
    attribute = draw.choice(draw.choice(nodes).attribute)
    kind = draw.randrange(5)
    if kind == 0:
        attribute.i = draw.choice(NUMBERS)
    elif kind == 1:
        attribute.type = draw.randrange(15)
    elif kind == 2:
        attribute.f = draw.choice((0.0, float("nan"), float("inf"), -1.0, 1e30))
    elif kind == 3 and attribute.ints:
        attribute.ints[draw.randrange(len(attribute.ints))] = draw.choice(NUMBERS)
    elif kind == 3:
        attribute.ints.extend(draw.choices(NUMBERS, k=3))
    else:
        attribute.s = b"\xff\xfe\x1b[31m"
        attribute.type = onnx.AttributeProto.STRING
    if kind == 0 and draw.random() < 0.5:
        attribute.type = onnx.AttributeProto.INT


def change_dimension(proto: onnx.ModelProto, draw: random.Random) -> None:
    shape = _value(proto, draw).type.tensor_type.shape
    kind = draw.randrange(4)
    if kind == 0 or not shape.dim:
        shape.dim.add(dim_value=draw.choice(NUMBERS))
    elif kind == 1:
        _drop(shape.dim, draw)
    elif kind == 2:
        draw.choice(shape.dim).dim_value = draw.choice(NUMBERS)
    else:
        draw.choice(shape.dim).dim_param = draw.choice(("batch", "", "\x1b]0;x\x07", "s" * 300))


def drop_type(proto: onnx.ModelProto, draw: random.Random) -> None:
    value = _value(proto, draw)
    draw.choice(
        (
            lambda: value.ClearField("type"),
            lambda: value.type.tensor_type.ClearField("shape"),
            lambda: value.type.tensor_type.ClearField("elem_type"),
            value.type.sequence_type.elem_type.tensor_type.shape.dim.add,
        )
    )()


def other_type(proto: onnx.ModelProto, draw: random.Random) -> None:
    number = draw.choice((*range(24), 99, -1, 1 << 30))
    _value(proto, draw).type.tensor_type.elem_type = number


def rename_value(proto: onnx.ModelProto, draw: random.Random) -> None:
    value, other = _value(proto, draw), _value(proto, draw)
    value.name = draw.choice((other.name, "", "\x1b[31mred", "new"))


def drop_value(proto: onnx.ModelProto, draw: random.Random) -> None:
    graph = proto.graph
    _drop(draw.choice((graph.input, graph.output, graph.value_info)), draw)


def change_tensor(proto: onnx.ModelProto, draw: random.Random) -> None:
    if not proto.graph.initializer:
        return
    tensor = draw.choice(proto.graph.initializer)
    kind = draw.randrange(5)
    if kind == 0:
        _drop(proto.graph.initializer, draw)
    elif kind == 1:
        tensor.dims.append(1)
    elif kind == 2:
        tensor.name = draw.choice(("", "other", proto.graph.input[0].name))
    elif kind == 3 and len(tensor.dims):
        tensor.dims[:] = [*tensor.dims[1:], tensor.dims[0]]
    else:
        tensor.data_type = draw.choice((1, 6, 7, 10, 12, 13, 16))


def change_constant(proto: onnx.ModelProto, draw: random.Random) -> None:
    """Change a number in a short list of integers: sizes, axes, limits."""
    lists = [t for t in proto.graph.initializer if t.data_type == 7 and 8 <= len(t.raw_data) <= 64]
    lists += [
        a.t
        for node in proto.graph.node
        if node.op_type == "Constant"
        for a in node.attribute
        if a.t.data_type == 7 and 8 <= len(a.t.raw_data) <= 64
    ]
    if lists:
        tensor = draw.choice(lists)
        at = 8 * draw.randrange(len(tensor.raw_data) // 8)
        number = draw.choice(NUMBERS).to_bytes(8, "little", signed=True)
        tensor.raw_data = tensor.raw_data[:at] + number + tensor.raw_data[at + 8 :]


def change_opset(proto: onnx.ModelProto, draw: random.Random) -> None:
    if not proto.opset_import:
        return
    entry = draw.choice(proto.opset_import)
    kind = draw.randrange(4)
    if kind == 0:
        _drop(proto.opset_import, draw)
    elif kind == 1:
        proto.ir_version = draw.choice(NUMBERS)
    elif kind == 2:
        entry.domain = draw.choice(("", "x", "com.microsoft", "ai.onnx"))
    else:
        entry.version = draw.choice((*NUMBERS, 13, 14, 15, 23, 24, 25, 99))


def change_metadata(proto: onnx.ModelProto, draw: random.Random) -> None:
    key = draw.choice(("tq_onnx.plan", "tq_onnx.layout_digest", "\x1b[1m", "tq_onnx.version"))
    proto.metadata_props.add(key=key, value=draw.choice(("", "{}", "\x1b[2J", "[1]", "null")))


EDITS: Sequence[Edit] = (
    *(drop_input, drop_input, blank_input, other_input, more_inputs, drop_output, rename_output),
    *(drop_node, move_node, other_operator, drop_attribute, change_attribute, change_attribute),
    *(change_dimension, change_dimension, drop_type, drop_type, other_type, rename_value),
    *(drop_value, change_tensor, change_constant, change_constant, change_opset, change_metadata),
)


def mutated(number: int) -> tuple[str, bytes]:
    """Return what mutation ``number`` does, and the file."""
    draw = random.Random(number)
    base = BASES[number % len(BASES)]
    proto = onnx.load(FIXTURES / f"{base}.onnx")
    edits = draw.choices(EDITS, k=draw.choice((1, 1, 1, 2, 3)))
    for edit in edits:
        edit(proto, draw)
    content = bytearray(proto.SerializeToString())
    names = [edit.__name__ for edit in edits]
    if draw.random() < 0.1:  # bytes that are no UTF-8 in a name
        name = draw.choice([*_node(proto, draw).output, _value(proto, draw).name]).encode()
        at = content.find(name) if name else -1
        while at >= 0:
            content[at] = 0xFF
            at = content.find(name) if draw.random() < 0.7 else -1
        names.append("no_utf8")
    if draw.random() < 0.05:
        content[draw.randrange(len(content))] ^= draw.randrange(1, 256)
        names.append("flip")
    return f"{base}: {', '.join(names)}", bytes(content)


def broken_promise(number: int, folder: Path) -> str:
    """Return which promise the commands break for a mutation; empty if they keep all."""
    what, content = mutated(number)
    path = folder / "model.onnx"
    path.write_bytes(content)
    begin = time.monotonic()
    looked = run("inspect", path, "--json")
    middle = time.monotonic()
    output = folder / "out.onnx"
    done = run("convert", path, "-o", output)
    end = time.monotonic()
    written = output.exists()
    output.unlink(missing_ok=True)
    problems = []
    for name, outcome, seconds in (
        ("inspect", looked, middle - begin),
        ("convert", done, end - middle),
    ):
        if outcome.code not in (0, 3, 4):
            problems.append(f"{name} exits with {outcome.code} ({outcome.err.strip()[:300]})")
        if seconds > MOST_SECONDS:
            problems.append(f"{name} takes {seconds:.0f} s")
        if not all(char.isprintable() or char == "\n" for char in outcome.out + outcome.err):
            problems.append(f"{name} sends control characters")
        if outcome.code and outcome.err.count("\n") > 1:
            problems.append(f"{name} says more than a sentence ({outcome.err[:300]})")
    if looked.code == 0 and looked.document["plan"] is None:
        offers = {offer["preset"]: offer["refusal"] for offer in looked.document["presets"]}
        if (done.code == 0) != (not offers["int4"]):
            problems.append(f"inspect offers int4, convert exits with {done.code} ({done.err})")
    elif done.code == 0:
        problems.append(f"inspect exits with {looked.code} and convert with 0")
    if written != (done.code == 0):
        problems.append("the output is there although convert failed, or the other way round")
    if list(folder.iterdir()) != [path]:
        problems.append("files are left")
    return f"{number} ({what}): {'; '.join(problems)}" if problems else ""


def main() -> None:
    """Run the mutations from one number to another."""
    first, last = map(int, sys.argv[1:3])
    found, codes = 0, 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, last):
            problem = broken_promise(number, Path(folder))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if peak > MOST_BYTES:
                print(f"{number}: the peak of memory is {peak >> 20} MiB", flush=True)
                return
            codes += 1
            if problem:
                found += 1
                print(problem, flush=True)
    seconds = time.monotonic() - begin
    print(f"{codes} mutations, {found} broken promises, {seconds:.0f} s, {peak >> 20} MiB")


if __name__ == "__main__":
    main()
