"""Find how many tokens a call may have where a recurrence is computed in chunks of tokens.

PyTorch code for linear attention pads the tokens of a call to a multiple of a chunk and goes from
chunk to chunk in a loop of Python. An exporter that follows one call writes down the steps of that
call. Another number of chunks then fails, or all chunks but the first are left out, and the logits
are wrong. A Loop or a Scan would have as many steps as a call needs.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from tq_onnx.graph.constants import scalar
from tq_onnx.graph.liveness import data_ancestors, live_nodes
from tq_onnx.graph.operators import kind


def chunk_tokens(graph: ir.Graph) -> int | None:
    """Return the tokens of the smallest chunk that those of a call are padded to.

    Returns:
        The tokens; None if nothing is padded so, or if the graph has loops.
    """
    live = live_nodes(graph.outputs)
    if any(node.op_type in ("Loop", "Scan") for node in live):
        return None
    pads = [node for node in live if kind(node) == "Pad" and len(node.inputs) > 1]
    amounts = dict.fromkeys(node.inputs[1] for node in pads if node.inputs[1] is not None)
    return min((size for amount in amounts for size in _moduli(amount)), default=None)


def _moduli(amount: ir.Value) -> Iterator[int]:
    """Yield the constants by which an amount of padding divides sizes."""
    for node in {value.producer() for value in data_ancestors([amount])}:
        if node is None or kind(node) != "Mod":
            continue
        size, modulus = node.inputs[:2]
        makers = () if size is None else (value.producer() for value in data_ancestors([size]))
        number = scalar(modulus)
        if number is not None and number > 1 and any(m and m.op_type == "Shape" for m in makers):
            yield int(number)
