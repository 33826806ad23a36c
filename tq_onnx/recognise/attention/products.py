"""Matrix products of decomposed attention, in the three operators that exporters use.

All are read as ``left [B, H, M, K] x right [B, H, K, N] -> [B, H, M, N]``: the query or the
probabilities are left, the cache is right. Batch and heads may be one dimension. ``FusedMatMul``
may turn the right one and carry a factor; an ``Einsum`` names its dimensions, so that either
operand may come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_float, attribute_int
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.recognise.caches import Dims

_RANK: Final = 4
_STRAIGHT: Final = (0, 1, 2, 3)
_TURNED: Final = (0, 1, 3, 2)


@dataclass(frozen=True)
class Product:
    """The operands and the factor of a matrix product."""

    left: int  #: the input that is the query or the probabilities
    right: int  #: the input that is the cache
    factor: float  #: what the result is multiplied by
    axes: tuple[int, ...]  #: dimensions of the right input in the order ``[B, H, K, N]``

    def layout(self, dims: Dims) -> Dims:
        """Return the dimensions of the right operand in the order ``[B, H, K, N]``."""
        if len(dims) == _RANK:
            return tuple(dims[axis] for axis in self.axes)
        return dims[:-2] + dims[:-3:-1] if self.axes == _TURNED else dims


def product(node: ir.Node) -> Product:
    """Read a node of ``operators.PRODUCTS``."""
    if kind(node) == "MatMul":
        return Product(0, 1, 1.0, _STRAIGHT)
    if kind(node) == "Einsum":
        return _einsum(node)
    for name in ("transA", "transBatchA", "transBatchB"):
        if attribute_int(node, name, 0):
            raise NoMatch(f"the {node.op_type} has the attribute {name}", node)
    axes = _TURNED if attribute_int(node, "transB", 0) else _STRAIGHT
    return Product(0, 1, attribute_float(node, "alpha", 1.0), axes)


def _einsum(node: ir.Node) -> Product:
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    operands, _, result = equation.partition("->")
    terms = operands.split(",")
    if len(terms) == 2 and all(_plain(term) for term in (*terms, result)):
        batch, heads, row, column = list(result)
        left = 0 if row in terms[0] else 1
        contracted = set(terms[left]) - set(result)
        if len(contracted) == 1:
            summed = contracted.pop()
            letters = f"{batch}{heads}{summed}{column}"
            if terms[left] == f"{batch}{heads}{row}{summed}" and set(terms[1 - left]) == {*letters}:
                axes = tuple(terms[1 - left].index(letter) for letter in letters)
                return Product(left, 1 - left, 1.0, axes)
    raise NoMatch(f"the Einsum is {equation}, not a product of matrices [B, H, ...]", node)


def _plain(term: str) -> bool:
    return len(term) == _RANK == len(set(term)) and term.isalpha()
