"""Type and shape inference of the decoder's own operators, by the same rules as ``inference``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from onnx.shape_inference import InferenceContext

from tq_onnx.ops import domain
from tq_onnx.ops.node import Node, Size
from tq_onnx.ops.operator import Output
from tq_onnx.ops.operators import Gather, RmsNormalization, RotaryEmbedding, Swish, Transpose

PERMUTATION: Final = (0, 2, 1, 3)
"""The only ``perm`` that Transpose has."""


def _like_floats(node: Node, output: Output) -> None:
    """State an output of the type and shape of the input that has the model's element type."""
    node.output(output, node.element_type(node.floats), node.sizes(node.floats))


def infer_rms_normalization(context: InferenceContext) -> None:
    """Infer Y: as X."""
    node = Node(context, RmsNormalization.X)
    epsilon = node.number(RmsNormalization.epsilon)
    if not 0 <= epsilon < math.inf:
        raise node.error(f"epsilon is {epsilon:g}, not a finite number from 0 on")
    sizes = node.sizes(node.floats)
    if sizes is not None and not sizes:
        raise node.error("X has no dimensions")
    (width,) = node.shape(RmsNormalization.scale, 1)
    node.same("the last dimension of X and scale", width, *(sizes or [])[-1:])
    _like_floats(node, RmsNormalization.Y)


def infer_rotary_embedding(context: InferenceContext) -> None:
    """Infer Y: as X."""
    node = Node(context, RotaryEmbedding.X)
    batch, _, tokens, head_size = node.shape(RotaryEmbedding.X, 4)
    rows, half = node.shape(RotaryEmbedding.cos_cache, 2)
    sine_rows, sine_half = node.shape(RotaryEmbedding.sin_cache, 2)
    node.same("the number of rows of cos_cache and sin_cache", rows, sine_rows)
    half = node.same("the width of cos_cache and sin_cache", half, sine_half)
    if isinstance(half, int):
        node.same("the head size of X and twice the width of cos_cache", head_size, 2 * half)
    position_batch, position_tokens = node.shape(RotaryEmbedding.position_ids, 2)
    node.one_of("the batch size of position_ids", position_batch, 1, batch)
    node.same("the number of tokens of X and position_ids", tokens, position_tokens)
    _like_floats(node, RotaryEmbedding.Y)


def infer_swish(context: InferenceContext) -> None:
    """Infer Y: as X."""
    _like_floats(Node(context, Swish.X), Swish.Y)


def infer_transpose(context: InferenceContext) -> None:
    """Infer Y: the two dimensions in the middle exchanged."""
    node = Node(context, Transpose.X)
    perm = node.integers(Transpose.perm)
    if perm != PERMUTATION:
        raise node.error(f"perm is {list(perm)}, not {list(PERMUTATION)}")
    sizes = node.shape(Transpose.X, 4)
    node.output(Transpose.Y, node.element_type(node.floats), [sizes[axis] for axis in PERMUTATION])


def infer_gather(context: InferenceContext) -> None:
    """Infer Y: the shape of indices and the width of data."""
    node = Node(context, Gather.data)
    _, width = node.shape(Gather.data, 2)
    indices = node.sizes(Gather.indices)
    if indices is not None and len(indices) not in (1, 2):
        raise node.error(f"indices has {len(indices)} dimensions, not 1 or 2")
    shape: Sequence[Size] | None = None if indices is None else [*indices, width]
    node.output(Gather.Y, node.element_type(node.floats), shape)


INFERENCE: Final[Mapping[str, Callable[[InferenceContext], None]]] = {
    domain.RMS_NORMALIZATION: infer_rms_normalization,
    domain.ROTARY_EMBEDDING: infer_rotary_embedding,
    domain.SWISH: infer_swish,
    domain.TRANSPOSE: infer_transpose,
    domain.GATHER: infer_gather,
}
"""The functions by the operators' names."""
