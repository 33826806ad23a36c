"""A converted decoder for CANN's graph mode: standard ONNX, numbers for sizes, nothing else.

    norms, rotary -> lengths -> bodies -> constants -> opset -> check

With ``enable_cann_graph=1``, its default, CANNExecutionProvider never takes a kernel of ours; it
hands graphs of standard operators to CANN, which compiles them for the sizes of their inputs. So
here the operators become the function bodies that every converted model carries, caches have a
fixed capacity, calls a fixed number of tokens, and lengths are read from the attention mask
(``tq_onnx.targets.cann_graph.masklengths``). All of it are operators that the provider takes, so
that it makes one graph of the model. Norms and rotary embeddings that onnxruntime has operators for
become standard ONNX as well (``tq_onnx.targets.cann``). The same file runs wherever ONNX does.

CANN's parser is given the bytes of a graph and no folder, so the weights are in the model itself,
which may have 2 GiB then.

Refused, by name: a model without ``attention_mask``, masks that hide more than the future and
padding, nodes that the provider does not take or that opset 16 does not have, too many weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tq_onnx.conversion.bake import add_functions
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.shapes import fill_shapes
from tq_onnx.ops.domain import DECODER, DOMAIN, VERSION
from tq_onnx.ops.functions import decoder_function_protos
from tq_onnx.plan import CANN_GRAPH, CPU, METADATA_PLAN, Plan
from tq_onnx.targets.cann.rmsnormalization import lower_norms
from tq_onnx.targets.cann.rotary import lower_rotary
from tq_onnx.targets.cann_graph import graphoperators as provider
from tq_onnx.targets.cann_graph.bodies import inline_operators
from tq_onnx.targets.cann_graph.masklengths import Sizes, fix_lengths
from tq_onnx.targets.cann_graph.standard import lower_opset, simplify

__all__ = ["lower_for_graph_mode"]

MOST_BYTES: Final = (1 << 31) - (1 << 24)
"""Of all weights: a model is one protobuf message, which has its graph in it too."""

_NORMS: Final = ("SimplifiedLayerNormalization", "LayerNormalization", "RMSNormalization")
"""Of the default domain, and not taken by the provider."""

_EXPORT: Final = "export the model for the CPU, in float32 or float16"


def lower_for_graph_mode(
    model: ir.Model, *, capacity: int, tokens: int = 1, batch: int = 1
) -> Plan:
    """Rewrites a converted model in place.

    Args:
        model: from ``convert``.
        capacity: tokens that the caches have room for, the new ones included.
        tokens: new tokens in a call. A prompt is fed so many at a time; a second file with more of
            them reads prompts faster, and goes on with the same caches.
        batch: sequences.

    Returns:
        The plan of what the model is now, which is in its metadata too.

    Raises:
        UsageError: the sizes are not positive, or there is no room for the tokens of a call.
        UnsupportedModelError: a part of the model has no form in graph mode; it is spoilt then.
    """
    if min(capacity, tokens, batch) < 1 or tokens > capacity:
        raise UsageError(
            f"a capacity of {capacity} has no room for {tokens} tokens in {batch} sequences",
            where="graph mode",
            fix="give positive numbers, and a capacity of more tokens than a call has",
        )
    text = model.metadata_props.get(METADATA_PLAN)
    if text is None:
        raise UnsupportedModelError(
            "it is not a converted model", where="graph mode", fix="convert it first"
        )
    plan = Plan.from_json(text)
    if plan.target != CPU:
        raise UnsupportedModelError(
            f"it was converted for {plan.target}",
            where="graph mode",
            fix="convert the original with --target cann-graph",
        )
    sizes = Sizes(batch, tokens, capacity)
    fill_shapes(model)
    _use_standard_operators(model, capacity)
    try:
        fix_lengths(model, Builder(model.graph), plan, sizes)
    except NoMatch as miss:
        raise UnsupportedModelError(miss.reason, where="graph mode", fix=_EXPORT) from miss
    RemoveUnusedNodesPass()(model)
    inline_operators(model, plan, sizes)
    fill_shapes(model)
    simplify(model)
    _check(model)
    lower_opset(model)
    _embed(model)
    layers = tuple(replace(layer, has_bias=True, causal=True) for layer in plan.layers)
    interface = replace(plan.interface, static=True)
    lowered = replace(
        plan, target=CANN_GRAPH, fixed_capacity=True, interface=interface, layers=layers
    )
    model.metadata_props[METADATA_PLAN] = lowered.to_json()
    return lowered


def _use_standard_operators(model: ir.Model, positions: int) -> None:
    """Norms and rotary embeddings of other domains as operators of ours, which have bodies."""
    if not any(node.domain not in ("", DOMAIN) or node.op_type in _NORMS for node in model.graph):
        return
    build = Builder(model.graph)
    lower_norms(model, build)
    RemoveUnusedNodesPass()(model)
    lower_rotary(model, build, positions)
    RemoveUnusedNodesPass()(model)
    used = {node.op_type for node in model.graph if node.domain == DOMAIN}
    add_functions(model, decoder_function_protos([name for name in DECODER if name in used]))
    model.opset_imports.setdefault(DOMAIN, VERSION)


def _embed(model: ir.Model) -> None:
    """Reads weights in other files into the model."""
    values = list(model.graph.initializers.values())
    size = sum(value.const_value.nbytes for value in values if value.const_value is not None)
    if size > MOST_BYTES:
        raise UnsupportedModelError(
            f"its weights have {size} bytes, and a graph for CANN can have {MOST_BYTES}",
            where="graph mode",
            fix="convert it with --target cann, which runs operators one by one",
        )
    for value in values:
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            array = np.array(tensor.numpy())
            value.const_value = ir.Tensor(array, dtype=tensor.dtype, name=tensor.name)


def _check(model: ir.Model) -> None:
    """Refuses what would cut the graph or has sizes that depend on numbers."""
    for what, found in (
        ("the provider cannot take the whole model", list(provider.left_over(model))),
        ("a size depends on numbers", list(provider.not_static(model))),
    ):
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise UnsupportedModelError(
                f"{what}: {found[0]}{more}", where="graph mode", fix=_EXPORT
            )
