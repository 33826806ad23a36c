"""A static graph in the form that CANN's parser reads: constants folded, an older opset.

The documentation of CANN's parser lists the opsets of every operator; ``ReduceMean``, for one, is
read up to opset 16 only, where its axes are an attribute. A graph of numbers for sizes needs little
of what came later, so it is written in opset 16. Other operators are refused by name.
"""

from __future__ import annotations

from typing import Final

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    DeduplicateInitializersPass,
    IdentityEliminationPass,
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
)
from onnxscript.optimizer import fold_constants

from tq_onnx.errors import UnsupportedModelError
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import integers
from tq_onnx.graph.shapes import fill_shapes
from tq_onnx.graph.values import label, rank

OPSET: Final = 16
IR_VERSION: Final = 8

_MOST_FOLDED: Final = 1 << 31
"""Bytes of a constant: weights too, as a node of constants only would cut the graph."""

_MOST_ROUNDS: Final = 8
_REDUCTIONS: Final = frozenset(
    {
        *("ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2"),
        *("ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"),
    }
)
"""Those whose axes became an input in opset 18."""


def simplify(model: ir.Model) -> None:
    """Compute what is constant, and remove what does nothing, until nothing changes."""
    _use_claimed(model)
    for _ in range(_MOST_ROUNDS):
        before = len(model.graph)
        _forget_guesses(model)
        fill_shapes(model)
        fold_constants(
            model,
            onnx_shape_inference=True,
            input_size_limit=_MOST_FOLDED,
            output_size_limit=_MOST_FOLDED,
            should_fold=lambda node: not node.op_type.startswith("Random"),
        )
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        changed = _drop_empty(model) + _drop_idle(model) + _drop_choices(model)
        IdentityEliminationPass()(model)
        RemoveUnusedNodesPass()(model)
        DeduplicateInitializersPass()(model)
        CommonSubexpressionEliminationPass()(model)
        if not changed and len(model.graph) == before:
            return


def _use_claimed(model: ir.Model) -> None:
    """Replace operators that the provider does not take by others that it takes."""
    build = Builder(model.graph)
    for node in list(model.graph):
        source = node.inputs[0] if node.inputs else None
        if node.domain != "" or source is None:
            continue
        if node.op_type == "CastLike":
            like = node.inputs[1]
            if like is not None and like.dtype is not None:
                node.op_type = "Cast"
                node.resize_inputs(1)
                node.attributes["to"] = ir.AttrInt64("to", int(like.dtype))
        elif node.op_type == "IsNaN":
            with build.before(node, "graph_mode"):
                is_number = build.op("Equal", [source, source], "is_number", dtype=ir.DataType.BOOL)
            node.op_type = "Not"
            node.replace_input_with(0, is_number)


def _forget_guesses(model: ir.Model) -> None:
    """Take away shapes with unknown sizes, which inference would not replace by better ones."""
    for node in model.graph:
        for value in node.outputs:
            if value.shape is not None and not value.shape.is_static():
                value.shape = None


def _drop_empty(model: ir.Model) -> int:
    """Take operands without elements out of Concats; return how many."""
    count = 0
    for node in model.graph:
        if node.op_type != "Concat" or node.domain != "":
            continue
        operands = [value for value in node.inputs if value is None or not _is_empty(value)]
        count += len(node.inputs) - len(operands)
        if len(operands) == len(node.inputs) or not operands:
            continue
        for index, value in enumerate(operands):
            node.replace_input_with(index, value)
        node.resize_inputs(len(operands))
        if len(operands) == 1:
            _make_identity(node)
    return count


def _drop_idle(model: ir.Model) -> int:
    """Remove Slices of everything and changes to the same shape; return how many."""
    count = 0
    for node in model.graph:
        if node.domain != "" or node.op_type not in ("Slice", "Reshape", "Expand"):
            continue
        source, shape = node.inputs[0], node.outputs[0].shape
        is_idle = source is not None and source.shape is not None and source.shape == shape
        if not is_idle or shape is None or not shape.is_static():
            continue
        if node.op_type == "Slice" and not _steps_forward(node):
            continue
        _make_identity(node)
        count += 1
    return count


def _drop_choices(model: ir.Model) -> int:
    """Remove Wheres that always choose the same operand; return how many."""
    count = 0
    for node in model.graph:
        if node.op_type != "Where" or node.domain != "" or node.inputs[0] is None:
            continue
        condition = node.inputs[0].const_value
        if condition is None or condition.size != 1:
            continue
        chosen = node.inputs[1 if condition.numpy().item() else 2]
        if chosen is None or chosen.shape is None or chosen.shape != node.outputs[0].shape:
            continue
        node.replace_input_with(0, chosen)
        _make_identity(node)
        count += 1
    return count


def _steps_forward(node: ir.Node) -> bool:
    steps = node.inputs[4] if len(node.inputs) > 4 else None
    numbers = integers(steps) if steps is not None else (1,)
    return numbers is not None and all(step > 0 for step in numbers)


def _make_identity(node: ir.Node) -> None:
    node.op_type = "Identity"
    node.resize_inputs(1)
    node.attributes.clear()


def _is_empty(value: ir.Value) -> bool:
    return value.shape is not None and any(dim == 0 for dim in value.shape)


def lower_opset(model: ir.Model) -> None:
    """Write a simplified graph in opset 16.

    Raises:
        UnsupportedModelError: a node has no such form.
    """
    for node in model.graph:
        if node.op_type in _REDUCTIONS and node.domain == "" and len(node.inputs) > 1:
            _axes_to_attribute(node)
        node.attributes.pop("noop_with_empty_axes", None)
        if node.op_type == "Cast":
            node.attributes.pop("saturate", None)
        elif node.op_type == "Reshape" and 0 not in (integers(node.inputs[1]) or (0,)):
            node.attributes.pop("allowzero", None)
        elif node.op_type == "Split" and _is_even(node):
            node.attributes.pop("num_outputs", None)
        if node.domain == "" and not _is_in(node, OPSET):
            raise UnsupportedModelError(
                f"{label(node)} ({node.op_type}) has no form in opset {OPSET}",
                where="graph mode",
                fix="export the model with an older opset",
            )
    model.opset_imports[""] = min(model.opset_imports[""], OPSET)
    model.ir_version = IR_VERSION


def _axes_to_attribute(node: ir.Node) -> None:
    axes = node.inputs[1]
    numbers = None if axes is None else integers(axes)
    size = None if node.inputs[0] is None else rank(node.inputs[0])
    if axes is not None and (numbers is None or size is None):
        return  # it is refused below, by name
    node.resize_inputs(1)
    if numbers:
        node.attributes["axes"] = ir.AttrInt64s("axes", [int(axis) for axis in numbers])


def _is_even(node: ir.Node) -> bool:
    """Return True if a Split is the same without its number of outputs."""
    shapes = {None if value.shape is None else tuple(value.shape) for value in node.outputs}
    has_sizes = len(node.inputs) > 1 and node.inputs[1] is not None
    return has_sizes or (len(shapes) == 1 and None not in shapes)


def _is_in(node: ir.Node, opset: int) -> bool:
    """Return True if an operator with these inputs and attributes is in an opset."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return False
    return (
        not schema.deprecated
        and schema.min_input <= len(node.inputs) <= schema.max_input
        and set(node.attributes) <= set(schema.attributes)
    )
