"""Type and shape inference of the decoder's own operators, by the same rules as ``inference``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from onnx.shape_inference import InferenceContext

from tq_onnx.ops import domain
from tq_onnx.ops.node import Node, Size

PERMUTATION: Final = (0, 2, 1, 3)
"""What ``perm`` of Transpose must be."""


def _like_input(node: Node) -> None:
    """The output has the type and shape of input 0."""
    node.output(node.element_type(0), node.sizes(0))


def infer_rms_normalization(context: InferenceContext) -> None:
    """Y: as X.

    Raises:
        InferenceError: epsilon is negative or not finite, X is a scalar, or scale has another size.
    """
    node = Node(context, "X")
    epsilon = node.number("epsilon")
    if not 0 <= epsilon < math.inf:
        raise node.error(f"epsilon is {epsilon:g}, not a finite number from 0 on")
    sizes = node.sizes(0)
    if sizes is not None and not sizes:
        raise node.error("X has no dimensions")
    (width,) = node.shape(1, "scale", 1)
    node.same("the last dimension of X and scale", width, *(sizes or [])[-1:])
    _like_input(node)


def infer_rotary_embedding(context: InferenceContext) -> None:
    """Y: as X.

    Raises:
        InferenceError: static sizes contradict each other.
    """
    node = Node(context, "X")
    batch, _, tokens, head_size = node.shape(0, "X", 4)
    rows, half = node.shape(1, "cos_cache", 2)
    sine_rows, sine_half = node.shape(2, "sin_cache", 2)
    node.same("the number of rows of cos_cache and sin_cache", rows, sine_rows)
    half = node.same("the width of cos_cache and sin_cache", half, sine_half)
    if isinstance(half, int):
        node.same("the head size of X and twice the width of cos_cache", head_size, 2 * half)
    position_batch, position_tokens = node.shape(3, "position_ids", 2)
    node.one_of("the batch size of position_ids", position_batch, 1, batch)
    node.same("the number of tokens of X and position_ids", tokens, position_tokens)
    _like_input(node)


def infer_swish(context: InferenceContext) -> None:
    """Y: as X."""
    _like_input(Node(context, "X"))


def infer_transpose(context: InferenceContext) -> None:
    """Y: the two dimensions in the middle exchanged.

    Raises:
        InferenceError: perm is another one, or X has not four dimensions.
    """
    node = Node(context, "X")
    perm = node.integers("perm")
    if perm != PERMUTATION:
        raise node.error(f"perm is {list(perm)}, not {list(PERMUTATION)}")
    sizes = node.shape(0, "X", 4)
    node.output(node.element_type(0), [sizes[axis] for axis in PERMUTATION])


def infer_gather(context: InferenceContext) -> None:
    """Y: the shape of indices and the width of data.

    Raises:
        InferenceError: data is not a table, or indices have not one or two dimensions.
    """
    node = Node(context, "data")
    _, width = node.shape(0, "data", 2)
    indices = node.sizes(1)
    if indices is not None and len(indices) not in (1, 2):
        raise node.error(f"indices has {len(indices)} dimensions, not 1 or 2")
    shape: Sequence[Size] | None = None if indices is None else [*indices, width]
    node.output(node.element_type(0), shape)


INFERENCE: Final[Mapping[str, Callable[[InferenceContext], None]]] = {
    domain.RMS_NORMALIZATION: infer_rms_normalization,
    domain.ROTARY_EMBEDDING: infer_rotary_embedding,
    domain.SWISH: infer_swish,
    domain.TRANSPOSE: infer_transpose,
    domain.GATHER: infer_gather,
}
"""The functions by the operators' names."""
