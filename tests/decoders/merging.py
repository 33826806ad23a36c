"""Merges two decoders into the branches of an If, as optimum's ``merge_decoders`` does."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx_ir as ir

from tests.decoders.running import FIXTURES, NUMPY, Array, batch
from tq_onnx.runtime.session import make_session

FLAG = "use_cache_branch"
CHUNKS = (7, 1, 3, 1)


def merge(first: onnx.ModelProto, following: onnx.ModelProto) -> onnx.ModelProto:
    """The merged model; inputs and weights of one name are one."""
    inputs = {v.name: v for model in (first, following) for v in model.graph.input}
    weights: dict[str, onnx.TensorProto] = {}
    branches = []
    for name, model in (("else", first), ("then", following)):
        new = {}
        for tensor in model.graph.initializer:
            key = f"{tensor.name}_merged"  # which no value in a branch is called
            if key in weights and weights[key].raw_data != tensor.raw_data:
                key = f"{tensor.name}_{name}"
            new[tensor.name], tensor.name = key, key
            weights[key] = tensor
        for node in model.graph.node:
            node.input[:] = [new.get(value, value) for value in node.input]
        graph = onnx.GraphProto(name=name, node=model.graph.node, output=model.graph.output)
        branches.append(
            onnx.AttributeProto(name=f"{name}_branch", type=onnx.AttributeProto.GRAPH, g=graph)
        )
    flag = onnx.ValueInfoProto(name=FLAG)
    flag.type.tensor_type.elem_type = onnx.TensorProto.BOOL
    flag.type.tensor_type.shape.dim.add(dim_value=1)
    outputs = following.graph.output
    names = [value.name for value in outputs]
    switch = onnx.NodeProto(
        op_type="If", name="merged_if", input=[FLAG], output=names, attribute=branches
    )
    merged = onnx.ModelProto(ir_version=following.ir_version)
    merged.opset_import.extend(
        {entry.domain: entry for m in (first, following) for entry in m.opset_import}.values()
    )
    graph = onnx.GraphProto(name="merged", node=[switch], output=outputs)
    graph.input.extend([*inputs.values(), flag])
    graph.initializer.extend(weights.values())
    merged.graph.CopyFrom(graph)
    return merged


def transformers_pair() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Two graphs of one decoder, with optimum's names: of a first prompt, and with caches."""
    first, following = (onnx.load(FIXTURES / f"hf-{name}.onnx") for name in ("prefill", "decode"))
    for model in (first, following):
        graph = model.graph
        for value in (*graph.input, *graph.output):
            value.name = _named(value.name)
        for node in graph.node:
            node.input[:] = [_named(name) for name in node.input]
            node.output[:] = [_named(name) for name in node.output]
        del graph.value_info[:]
    return first, following


def _named(name: str) -> str:
    found = re.fullmatch(r"(input\.|output\.|)past_key_values\.layers\.(\d)\.(key|value)s", name)
    if found is None:
        return name
    side = "past_key_values" if found[1] == "input." else "present"
    return f"{side}.{found[2]}.{found[3]}"


def single_outside(model: onnx.ModelProto) -> None:
    """Gives a merged model of float16 inputs and outputs of float32, as transformers.js' has."""
    graph = model.graph
    (switch,) = (onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node)
    before, after = [], []
    given = {value.name for value in graph.input}
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type != onnx.TensorProto.FLOAT16:
            continue
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        inner = f"{value.name}_half"
        _rename(switch, value.name, inner)
        if value.name in given:
            before.append(_cast(value.name, inner, onnx.TensorProto.FLOAT16))
        else:
            after.append(_cast(inner, value.name, onnx.TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend([*before, switch, *after])


def _rename(node: onnx.NodeProto, old: str, new: str) -> None:
    node.input[:] = [new if name == old else name for name in node.input]
    node.output[:] = [new if name == old else name for name in node.output]
    for attribute in node.attribute:
        for value in attribute.g.output:
            value.name = new if value.name == old else value.name
        for inner in attribute.g.node:
            _rename(inner, old, new)


def _cast(source: str, target: str, to: int) -> onnx.NodeProto:
    node = onnx.NodeProto(op_type="Cast", input=[source], output=[target])
    node.attribute.add(name="to", type=onnx.AttributeProto.INT, i=to)
    return node


def run(
    model: onnx.ModelProto | ir.Model, *, size: int = 1, padding: int = 0, library: bool = True
) -> Array:
    """Logits of all tokens that are no padding; the first call is of the branch without caches."""
    proto = model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)
    session = make_session(proto.SerializeToString(), library=library, threads=1)
    data = batch(sum(CHUNKS), size, left_padding=padding)
    encoder = np.random.default_rng(1).standard_normal((size, 5, 32))
    held: dict[str, Array] = {}
    found, start = [], 0
    for feeds in data.feeds(CHUNKS):
        given = feeds | held | {"encoder": encoder, FLAG: np.array([start > 0])}
        inputs = {}
        for entry in session.get_inputs():
            sizes = [size, *(n if isinstance(n, int) else 0 for n in entry.shape[1:])]
            value = np.asarray(given.get(entry.name, np.zeros(sizes)))
            inputs[entry.name] = value.astype(NUMPY[entry.type])
        names = [entry.name for entry in session.get_outputs()]
        results = dict(zip(names, session.run(names, inputs), strict=True))
        held |= {
            name.replace("present", past): value
            for name, value in results.items()
            for past in ("past_key_values", "past")
            # The branch with caches hands on nothing of the encoder.
            if name.startswith("present") and not ("cross" in name and start)
        }
        count = feeds["input_ids"].shape[1]
        found.append(results["logits"][data.real[:, start : start + count]])
        start += count
    return np.concatenate(found).astype(np.float64)
