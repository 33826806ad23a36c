"""Small models of the operators, for measurements on a device, benchmarks and tests.

An ``OperatorModel`` collects the inputs, initializers and nodes of one graph. Values are named: a
name that nothing has yet becomes an input of the model, or an initializer if ``constants`` has it.
Slots and element types come from the operators' records.

    model = OperatorModel("float16", constants=codec_constants(codec, 128))
    model.operator(Encode, encode_attributes(codec), "present")
    proto = model.build(["present"])
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.kind import NORM_KEPT, NOT_CORRECTED
from tq_onnx.codec.presets import QR
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.spec import Codec
from tq_onnx.ops.domain import BODY_OPSET, DOMAIN, VERSION
from tq_onnx.ops.operator import BYTES, FLOAT32, FLOATS, INT32, INT64, Input, Operator
from tq_onnx.ops.operators import Attention, Encode

Array = npt.NDArray[Any]
Shape = Sequence[int | str | None]

_IR_VERSION: Final = 9
_ELEMENTS: Final = {
    BYTES: ir.DataType.UINT8,
    INT64: ir.DataType.INT64,
    INT32: ir.DataType.INT32,
    FLOAT32: ir.DataType.FLOAT,
}


def element_type(dtype: str) -> ir.DataType:
    """Return the element type that numpy calls ``dtype``, bfloat16 included."""
    return ir.DataType.FLOAT if dtype == "float32" else ir.DataType[dtype.upper()]


class OperatorModel:
    """A model of a few nodes, made one after the other.

    Args:
        dtype: element type of the operators' floats: float32, float16 or bfloat16.
        constants: content of the values that are initializers, by name.
        shapes: shapes of inputs and of what nodes make, by name; unknown where they are missing.
        as_float32: whether the operators' floats enter and leave the model as float32 and are cast
            inside: numpy has no bfloat16.
    """

    def __init__(
        self,
        dtype: str = "float32",
        *,
        constants: Mapping[str, Array] | None = None,
        shapes: Mapping[str, Shape] | None = None,
        as_float32: bool = False,
    ) -> None:
        self.dtype = element_type(dtype)
        self._as_float32 = as_float32
        self._constants = constants or {}
        self._shapes = shapes or {}
        self._values: dict[str, ir.Value] = {}
        self._inputs: list[ir.Value] = []
        self._initializers: list[ir.Value] = []
        self._nodes: list[ir.Node] = []

    def input(self, name: str, dtype: ir.DataType) -> ir.Value:
        """Return the value of this name; make an input or an initializer if there is none."""
        if name in self._values:
            return self._values[name]
        if name in self._constants:
            tensor = ir.tensor(self._constants[name], name=name)
            made = self._named(name, tensor.dtype)
            made.shape = ir.Shape(self._constants[name].shape)
            made.const_value = tensor
            self._initializers.append(made)
        else:
            made = self._named(name, dtype)
            self._inputs.append(made)
        return made

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Mapping[str, ir.DataType],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        name: str = "",
    ) -> ir.Value:
        """Add a node of any operator.

        Args:
            op_type: the operator.
            inputs: values; None for an input that the node lacks.
            outputs: names of the values that it makes, and their element types.
            attributes: of the node.
            domain: of the operator.
            name: of the node; by default the name of its first output.

        Returns:
            Its first output.
        """
        made = [self._named(output, dtype) for output, dtype in outputs.items()]
        name = name or next(iter(outputs))
        given = dict(attributes or {})
        self._nodes.append(ir.node(op_type, inputs, given, domain=domain, outputs=made, name=name))
        return made[0]

    def operator(
        self,
        operator: type[Operator],
        attributes: Mapping[str, Any],
        output: str,
        *,
        names: Mapping[Input, str] | None = None,
        optional: Collection[Input] = (),
    ) -> ir.Value:
        """Add a node of one of our operators; it has the name of its output.

        Args:
            operator: its record.
            attributes: of the node.
            output: name of the value that it makes.
            names: names of the values that it reads, where they are not the inputs' own names.
            optional: which of its optional inputs the node has.

        Returns:
            Its output.
        """
        called = names or {}
        read: dict[Input, ir.Value | None] = {
            each: self._operand(called.get(each, each.name), each.element)
            for each in operator.inputs
            if not each.is_optional or each in optional
        }
        kind = operator.outputs[0].element
        dtype = _ELEMENTS.get(kind, self.dtype)
        casts = self._as_float32 and kind == FLOATS
        made = self.node(
            operator.name,
            operator.arguments(read),
            {f"{output}_{dtype.name}" if casts else output: dtype},
            attributes,
            domain=DOMAIN,
            name=output,
        )
        return self._cast(made, ir.DataType.FLOAT, output) if casts else made

    def build(
        self,
        outputs: Iterable[str],
        functions: Iterable[onnx.FunctionProto] = (),
        *,
        opsets: Mapping[str, int] | None = None,
    ) -> onnx.ModelProto:
        """Return the model.

        Args:
            outputs: names of its outputs.
            functions: bodies of the operators.
            opsets: versions of domains, beside or in place of the TurboQuant domain and of the
                bodies' opset.
        """
        graph = ir.Graph(
            self._inputs,
            [self._values[name] for name in outputs],
            nodes=self._nodes,
            initializers=self._initializers,
            opset_imports={"": BODY_OPSET, DOMAIN: VERSION, **(opsets or {})},
            name="operators",
        )
        bodies = [ir.serde.deserialize_function(function) for function in functions]
        return ir.to_proto(ir.Model(graph, ir_version=_IR_VERSION, functions=bodies))

    def _operand(self, name: str, kind: str) -> ir.Value:
        """Return what an operator reads; a float that enters as float32 is cast once."""
        if kind != FLOATS or not self._as_float32 or name in self._constants:
            return self.input(name, _ELEMENTS.get(kind, self.dtype))
        inside = f"{name}_cast"
        if inside in self._values:
            return self._values[inside]
        return self._cast(self.input(name, ir.DataType.FLOAT), self.dtype, inside)

    def _cast(self, value: ir.Value, dtype: ir.DataType, name: str) -> ir.Value:
        node_name = f"cast_{name}"
        made = self.node("Cast", [value], {name: dtype}, {"to": int(dtype)}, name=node_name)
        made.shape = value.shape if made.shape is None else made.shape
        return made

    def _named(self, name: str, dtype: ir.DataType) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype))
        if name in self._shapes:
            value.shape = ir.Shape(self._shapes[name])
        self._values[name] = value
        return value


def single_operator(
    operator: type[Operator],
    attributes: Mapping[str, Any],
    dtype: str = "float32",
    *,
    constants: Mapping[str, Array] | None = None,
    optional: Collection[Input] = (),
) -> bytes:
    """Return a serialised model of one node, whose values have the names of the record.

    Args:
        operator: the record of the operator.
        attributes: of the node.
        dtype: element type of its floats.
        constants: content of the inputs that are initializers, by name.
        optional: which of its optional inputs the node has.
    """
    model = OperatorModel(dtype, constants=constants)
    (output,) = operator.outputs
    model.operator(operator, attributes, output.name, optional=optional)
    serialised: bytes = model.build([output.name]).SerializeToString()
    return serialised


def codec_constants(
    codec: Codec, head_size: int, *, prefix: str = "", kind: str = QR, layer: int = 0
) -> dict[str, Array]:
    """Return what a codec reads as initializers: rotation, centroids and boundaries, float32.

    Args:
        codec: of a cache.
        head_size: D.
        prefix: begins the names: ``key_``, ``value_`` or nothing.
        kind: of the rotation.
        layer: whose rotation.

    Returns:
        The tables by name; one zero stands for each that the codec does without.
    """
    tables: list[Array] = [np.zeros(1, np.float32)] * 3
    if codec.is_rotated:
        book = codebook_of(codec, head_size)
        tables = [rotation_of(codec, kind, head_size, layer), book.centroids, book.boundaries]
    names = ("rotation", "centroids", "boundaries")
    return {f"{prefix}{name}": table for name, table in zip(names, tables, strict=True)}


def encode_attributes(codec: Codec, *, norm_correction: int = NORM_KEPT) -> dict[str, Any]:
    """Return the attributes of a node that encodes."""
    correction = int(norm_correction) if codec.corrects_norm else NOT_CORRECTED
    return {"codec": codec.kind, "bits": codec.bits, "norm_correction": correction}


def attention_attributes(key: Codec, value: Codec, scale: float) -> dict[str, Any]:
    """Return the attributes of causal attention without a window and without a cap."""
    codecs: dict[str, Any] = {"key_codec": key.kind, "key_bits": key.bits}
    codecs |= {"value_codec": value.kind, "value_bits": value.bits}
    return {"scale": scale, "causal": 1, "sliding_window": 0, "softcap": 0.0, **codecs}


def side_names(side: str) -> dict[Input, str]:
    """Return names for what encodes one side of a layer, ``key`` or ``value``."""
    tables = (
        *(Encode.rotation, Encode.centroids, Encode.boundaries),
        *(Encode.offset, Encode.frequencies, Encode.gains, Encode.feedback),
    )
    return {
        Encode.vectors: side,
        Encode.past: f"past_{side}",
        **{table: f"{side}_{table.name}" for table in tables},
    }


PRESENT_CACHES: Final = {
    Attention.key_cache: "present_key",
    Attention.value_cache: "present_value",
}
"""Names for attention that reads what the layer's encoders make."""
