"""Quantised weights as numbers: CANNExecutionProvider has no kernel for products with codes.

    ExpandWeightsPass -> everything else of the target -> NarrowProductsPass

The first pass replaces MatMulNBits by MatMul, with a weight in the type that the product is
computed in, GatherBlockQuantized by Gather, whose table keeps that type, and DequantizeLinear of a
constant by its numbers; the others see products as in an export that was never quantised. The last
one gives the weights of products the type that was asked for, and casts what is multiplied with
them and the result. No weight is computed before the model is written, and then piece by piece: all
weights go to the data file of the output, those that were in other files among them.

Weights are what onnxruntime's contrib operators say: codes of 2, 4 or 8 bits in blocks along K, the
low bits first, times the scale of the block after its zero point was subtracted, computed in
float32 and rounded once; of DequantizeLinear what ONNX says, with one scale, one for each place of
an axis, or one for each block along it. Refused by name: other widths, weights that are no
constants, ``g_idx``, weights that are packed for one kernel, tables that are no bytes or have
blocks along another axis, and other quantised operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.ascend.lowering.projections import EXPANDED, is_constant
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.files.streamed import Array, StreamedTensor, read_whole, sources_of, streamed
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.operators import kind
from tq_onnx.graph.shapes import fill_shapes
from tq_onnx.graph.sizerules import sizes
from tq_onnx.graph.values import label, substitute
from tq_onnx.ops.domain import MICROSOFT

MATMUL: Final = "MatMulNBits"
GATHER: Final = "GatherBlockQuantized"
DEQUANTIZE: Final = "DequantizeLinear"
TYPES: Final = {"float16": ir.DataType.FLOAT16, "float32": ir.DataType.FLOAT}
"""Element types that weights can be expanded to."""

_BITS: Final = (2, 4, 8)
_BYTE: Final = 8
_PIECE: Final = 4 << 20
"""Elements of the rows that are yielded at once, at least one block of every column."""

_TURNED: Final = 128 << 10
"""Elements that are computed at once."""

_GROUPS, _BIAS = 4, 5
_FIX: Final = "export its weights in float32 or float16"


@dataclass(frozen=True)
class _Packed:
    """A constant weight ``[K, N]``, whose columns are in blocks.

    Attributes:
        codes: uint8 ``[N, blocks, bytes]``.
        scales: one for each block, in the order of the codes.
        zero_points: likewise, packed like codes or floating-point; None for the middle code.
        rows: K.
        columns: N.
        bits: of a code.
        block: codes of a block.
    """

    codes: ir.TensorProtocol
    scales: ir.TensorProtocol
    zero_points: ir.TensorProtocol | None
    rows: int
    columns: int
    bits: int
    block: int

    @property
    def blocks(self) -> int:
        """Blocks of a column."""
        return -(-self.rows // self.block)

    def pieces(self, dtype: np.dtype[np.generic]) -> Iterator[Array]:
        """Yield the rows ``[.., N]`` of the weight ``[K, N]``, a few blocks at once."""
        codes = read_whole(self.codes).reshape(self.columns, self.blocks, -1)
        scales = read_whole(self.scales).reshape(self.columns, self.blocks)
        zeros = np.broadcast_to(self._zeros(), scales.shape)
        step = max(1, _PIECE // (self.columns * self.block))
        for first in range(0, self.blocks, step):
            part = slice(first, first + step)
            count = min(self.rows - first * self.block, codes[:1, part].shape[1] * self.block)
            rows = np.empty((count, self.columns), dtype)
            # A few columns at once stay in the processor's cache until they are turned.
            width = max(1, _TURNED // count)
            for column in range(0, self.columns, width):
                at = slice(column, column + width)
                numbers = self._numbers(codes[at, part], scales[at, part], zeros[at, part])
                rows[:, at] = numbers[:, :count].T
            yield rows

    def columns_of(self, dtype: np.dtype[np.generic]) -> Iterator[Array]:
        """Yield the columns ``[.., K]`` of the weight, a few at once."""
        codes = read_whole(self.codes).reshape(self.columns, self.blocks, -1)
        scales = read_whole(self.scales).reshape(self.columns, self.blocks)
        zeros = np.broadcast_to(self._zeros(), scales.shape)
        step = max(1, _TURNED // (self.blocks * self.block))
        for first in range(0, self.columns, step):
            part = slice(first, first + step)
            numbers = self._numbers(codes[part], scales[part], zeros[part])
            yield numbers[:, : self.rows].astype(dtype)

    def _numbers(self, codes: Array, scales: Array, zeros: Array) -> Array:
        """Return what codes ``[n, blocks, bytes]`` stand for, float32 ``[n, blocks * block]``."""
        numbers = _unpacked(codes, self.bits).astype(np.float32)
        numbers -= zeros[..., None]
        numbers *= scales[..., None].astype(np.float32)
        return numbers.reshape(len(numbers), -1)

    def _zeros(self) -> Array:
        """Return the zero points ``[N, blocks]``, or ``[1, 1]`` if all are the same."""
        if self.zero_points is None:
            return np.full((1, 1), 1 << (self.bits - 1), np.float32)
        zeros = read_whole(self.zero_points).reshape(self.columns, -1)
        if self.zero_points.dtype is ir.DataType.UINT8:
            zeros = _unpacked(zeros, self.bits)[:, : self.blocks]
        return zeros.astype(np.float32)


@dataclass(frozen=True)
class _Linear:
    """A constant of DequantizeLinear.

    Attributes:
        codes: of any shape.
        scales: one; or one for each place of the axis; or like the codes, with one along the axis
            for each block.
        zero_points: likewise; None for zeros.
        axis: of the scales.
        block: codes along the axis that share a scale; 1 where each place has its own.
    """

    codes: ir.TensorProtocol
    scales: ir.TensorProtocol
    zero_points: ir.TensorProtocol | None
    axis: int
    block: int

    def pieces(self, dtype: np.dtype[np.generic]) -> Iterator[Array]:
        """Yield the numbers, a few along the first axis at once."""
        shape = self.codes.shape.numpy()
        codes = _read(self.codes)
        step = max(1, _PIECE // max(1, self.codes.size // max(1, shape[0])))
        for first in range(0, shape[0], step):
            part = range(first, min(first + step, shape[0]))
            numbers = codes[part.start : part.stop].astype(np.float32)
            if self.zero_points is not None:
                numbers -= self._along(self.zero_points, part)
            numbers *= self._along(self.scales, part)
            yield numbers.astype(dtype)

    def _along(self, tensor: ir.TensorProtocol, part: range) -> Array:
        """Return scales or zero points of some places of the first axis, to be broadcast."""
        values = _read(tensor).astype(np.float32)
        if values.size == 1:
            return values.reshape(())
        rank, size = len(self.codes.shape), self.codes.shape.numpy()[self.axis]
        if values.ndim == 1 and rank > 1:
            values = values.reshape([-1 if at == self.axis else 1 for at in range(rank)])
        places = np.array(part) if self.axis == 0 else np.arange(size)
        if self.axis != 0 and values.shape[0] != 1:
            values = values[part.start : part.stop]
        along: Array = np.take(values, places // self.block, axis=self.axis)
        return along


def _read(tensor: ir.TensorProtocol) -> Array:
    """Return the elements of a tensor; several of 4 bits lie in a byte."""
    return read_whole(tensor) if tensor.dtype.bitwidth >= _BYTE else np.asarray(tensor.numpy())


def _expanded(
    name: str,
    constant: _Packed | _Linear,
    shape: tuple[int, ...],
    dtype: ir.DataType,
    pieces: Callable[[np.dtype[np.generic]], Iterator[Array]],
) -> ir.Value:
    """Return a new value with numbers that come in pieces."""
    sources = sources_of(constant.codes, constant.scales, constant.zero_points)
    tensor = StreamedTensor(lambda: pieces(dtype.numpy()), dtype, shape, name=name, sources=sources)
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=tensor.shape, const_value=tensor)


def _unpacked(packed: Array, bits: int) -> Array:
    """Return the codes in bytes ``[..., n]``, the low bits of a byte first."""
    if bits == _BYTE:
        return packed
    count = _BYTE // bits
    codes = np.empty((*packed.shape, count), np.uint8)
    for index in range(count):
        codes[..., index] = (packed >> np.uint8(index * bits)) & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)


class ExpandWeightsPass(ir.passes.InPlacePass):
    """Replaces MatMulNBits, GatherBlockQuantized and DequantizeLinear, in the model's type."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the nodes in place.

        Raises:
            UnsupportedModelError: a node has a form that is not known.
        """
        graph = model.graph
        fill_shapes(model)
        build = Builder(graph)
        before = len(graph)
        for node in list(graph):
            replaced = _REPLACED.get((node.domain, node.op_type))
            replacement = None if replaced is None else replaced(node, build, graph)
            if replacement is not None:
                substitute(node.outputs[0], replacement)
                graph.remove(node, safe=True)
        return ir.passes.PassResult(model, modified=len(graph) != before)


def _multiply(node: ir.Node, build: Builder, graph: ir.Graph) -> ir.Value:
    """Return what a MatMulNBits gives, by a MatMul, and an Add for a bias."""
    packed = _packed_product(node)
    dtype, shape = packed.scales.dtype, sizes(node.outputs[0])
    size = (packed.rows, packed.columns)
    name = build.unique(f"{packed.codes.name}.expanded")
    weight = _expanded(name, packed, size, dtype, packed.pieces)
    graph.register_initializer(weight)
    weight.meta[EXPANDED] = True
    bias = node.inputs[_BIAS] if len(node.inputs) > _BIAS else None
    with build.before(node, label(node)):
        product = build.op("MatMul", [node.inputs[0], weight], "MatMul", dtype=dtype, shape=shape)
        if bias is not None:
            product = build.op("Add", [product, bias], "Add", dtype=dtype, shape=shape)
    return product


def _look_up(node: ir.Node, build: Builder, graph: ir.Graph) -> ir.Value:
    """Return what a GatherBlockQuantized gives, by a Gather."""
    packed = _packed_table(node)
    dtype = packed.scales.dtype
    size = (packed.columns, packed.rows)
    name = build.unique(f"{packed.codes.name}.expanded")
    table = _expanded(name, packed, size, dtype, packed.columns_of)
    graph.register_initializer(table)
    with build.before(node, label(node)):
        return build.op(
            "Gather",
            [table, node.inputs[1]],
            "Gather",
            dtype=dtype,
            shape=sizes(node.outputs[0]),
            axis=0,
        )


def _numbers(node: ir.Node, build: Builder, graph: ir.Graph) -> ir.Value | None:
    """Return the numbers of a constant; None where DequantizeLinear is of something else."""
    codes = node.inputs[0]
    if codes is None or codes.const_value is None or not is_constant(codes):
        return None
    linear, dtype = _linear(node), node.outputs[0].dtype
    if dtype is None or dtype not in TYPES.values():
        raise _refusal(node, f"makes numbers of the type {dtype}")
    shape = tuple(linear.codes.shape.numpy())
    name = build.unique(f"{linear.codes.name}.expanded")
    numbers = _expanded(name, linear, shape, dtype, linear.pieces)
    graph.register_initializer(numbers)
    numbers.meta[EXPANDED] = True
    return numbers


_REPLACED: Final = {
    (MICROSOFT, MATMUL): _multiply,
    (MICROSOFT, GATHER): _look_up,
    ("", DEQUANTIZE): _numbers,
    (MICROSOFT, DEQUANTIZE): _numbers,
}


class NarrowProductsPass(ir.passes.InPlacePass):
    """Gives expanded weights the type that was asked for, and moves all weights to the output.

    Args:
        dtype: of the expanded weights.
    """

    def __init__(self, dtype: ir.DataType) -> None:
        super().__init__()
        self._dtype = dtype

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Change weights and products in place."""
        graph = model.graph
        build = Builder(graph)
        for node in list(graph):
            weight = node.inputs[1] if kind(node) == "MatMul" else None
            if weight is None or EXPANDED not in weight.meta:
                continue
            computed = node.outputs[0].dtype
            if computed is not None and computed is not self._dtype:
                self._narrow(node, weight, build, computed)
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = streamed(tensor, value.name or "")
        return ir.passes.PassResult(model, modified=True)

    def _narrow(
        self, node: ir.Node, weight: ir.Value, build: Builder, computed: ir.DataType
    ) -> None:
        tensor, (source, product) = weight.const_value, (node.inputs[0], node.outputs[0])
        assert tensor is not None  # an expanded one
        assert source is not None  # of a MatMul
        if tensor.dtype is not self._dtype:
            weight.const_value = _cast(tensor, self._dtype, weight.name or "")
            weight.type = ir.TensorType(self._dtype)
        to = int(self._dtype)
        with build.before(node, label(node)):
            cast = build.once(
                ("cast", source),
                lambda: build.op(
                    "Cast", [source], "Cast", dtype=self._dtype, shape=sizes(source), to=to
                ),
            )
            shape = sizes(product)
            narrow = build.op("MatMul", [cast, weight], "MatMul", dtype=self._dtype, shape=shape)
            back = build.op("Cast", [narrow], "Cast", dtype=computed, shape=shape, to=int(computed))
        substitute(product, back)
        node.graph.remove(node, safe=True)  # type: ignore[union-attr]


def _refusal(node: ir.Node, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{node.op_type} {what}", where=label(node), fix=_FIX)


def _constants(node: ir.Node, **slots: int) -> Iterator[ir.TensorProtocol]:
    """Yield the constants in some slots of a node.

    Raises:
        UnsupportedModelError: one is left out, or no constant.
    """
    for name, slot in slots.items():
        value = _source(node.inputs[slot]) if slot < len(node.inputs) else None
        if value is None or value.const_value is None or not is_constant(value):
            raise _refusal(node, f"has {name} that are no constant")
        yield value.const_value


def _source(value: ir.Value | None) -> ir.Value | None:
    """Return what a value is a view of: tables that a product shares are reshaped in the graph."""
    while value is not None:
        node = value.producer()
        if node is None or kind(node) != "Reshape":
            break
        value = node.inputs[0]
    return value


def _optional(node: ir.Node, name: str, slot: int) -> ir.TensorProtocol | None:
    if slot >= len(node.inputs) or node.inputs[slot] is None:
        return None
    return next(_constants(node, **{name: slot}))


def _packed_product(node: ir.Node) -> _Packed:
    """Return the weight of a MatMulNBits.

    Raises:
        UnsupportedModelError: it has a form that is not known.
    """
    if attribute_int(node, "weight_prepacked", 0):
        raise _refusal(node, "has a weight that is packed for one kernel")
    if len(node.inputs) > _GROUPS and node.inputs[_GROUPS] is not None:
        raise _refusal(node, "has g_idx, the block of each row, which cannot be expanded")
    codes, scales = _constants(node, B=1, scales=2)
    rows, columns = attribute_int(node, "K", 0), attribute_int(node, "N", 0)
    return _checked(node, (codes, scales, _optional(node, "zero_points", 3)), rows, columns)


def _linear(node: ir.Node) -> _Linear:
    """Return the constant of a DequantizeLinear.

    Raises:
        UnsupportedModelError: it has a form that is not known.
    """
    codes, scales = _constants(node, x=0, scales=1)
    zero_points = _optional(node, "zero_points", 2)
    shape, scale_shape = codes.shape.numpy(), scales.shape.numpy()
    axis, block = attribute_int(node, "axis", 1), attribute_int(node, "block_size", 0)
    axis += len(shape) if axis < 0 else 0
    if not shape or (scales.size > 1 and not 0 <= axis < len(shape)):
        raise _refusal(node, f"has {scales.size} scales along axis {axis} of {list(shape)}")
    expected = [1]
    if scales.size > 1:
        expected = [shape[axis]]
        if block:
            expected = [-(-n // block) if at == axis else n for at, n in enumerate(shape)]
    if scales.size > 1 and list(scale_shape) != expected:
        raise _refusal(node, f"has scales of the shape {list(scale_shape)} for {list(shape)}")
    if zero_points is not None and zero_points.size != scales.size:
        raise _refusal(node, f"has {zero_points.size} zero points for {scales.size} scales")
    return _Linear(codes, scales, zero_points, min(axis, len(shape) - 1), max(block, 1))


def _packed_table(node: ir.Node) -> _Packed:
    """Return the table of a GatherBlockQuantized, whose rows are columns of a weight.

    Raises:
        UnsupportedModelError: it has a form that is not known.
    """
    codes, scales = _constants(node, data=0, scales=2)
    columns, *inner = codes.shape.numpy()
    axes = [attribute_int(node, "gather_axis", 0), attribute_int(node, "quantize_axis", 1)]
    if not inner or axes[0] != 0 or axes[1] not in (-1, 1):
        raise _refusal(node, f"gathers and has its blocks along the axes {axes}")
    if codes.dtype is not ir.DataType.UINT8:
        raise _refusal(node, f"has data of the type {codes.dtype}, and UINT8 can be expanded")
    width = codes.size // columns * _BYTE // max(attribute_int(node, "bits", 4), 1)
    return _checked(node, (codes, scales, _optional(node, "zero_points", 3)), width, columns)


def _checked(
    node: ir.Node,
    tensors: tuple[ir.TensorProtocol, ir.TensorProtocol, ir.TensorProtocol | None],
    rows: int,
    columns: int,
) -> _Packed:
    codes, scales, zero_points = tensors
    bits, block = attribute_int(node, "bits", 4), attribute_int(node, "block_size", 0)
    if bits not in _BITS:
        raise _refusal(node, f"has codes of {bits} bits, and 2, 4 and 8 can be expanded")
    if rows < 1 or columns < 1 or block < 1:
        raise _refusal(node, f"is of {rows} by {columns} numbers in blocks of {block}")
    packed = _Packed(codes, scales, zero_points, rows, columns, bits, block)
    whole = node.op_type == MATMUL
    padded_rows = packed.blocks * block if whole else rows
    if codes.size * _BYTE != columns * padded_rows * bits or (rows % block and not whole):
        raise _refusal(node, f"has {codes.size} bytes for {rows} by {columns} codes of {bits} bits")
    if scales.size != columns * packed.blocks:
        raise _refusal(node, f"has {scales.size} scales for {columns * packed.blocks} blocks")
    return packed


def _cast(tensor: ir.TensorProtocol, dtype: ir.DataType, name: str) -> StreamedTensor:
    """Return a tensor in another type."""
    arrays: Callable[[], Iterator[Array]] = (
        tensor.arrays if isinstance(tensor, StreamedTensor) else lambda: iter([tensor.numpy()])
    )

    def pieces() -> Iterator[Array]:
        return (array.astype(dtype.numpy()) for array in arrays())

    sources = tensor.sources if isinstance(tensor, StreamedTensor) else ()
    return StreamedTensor(pieces, dtype, tuple(tensor.shape.numpy()), name=name, sources=sources)
