"""What tests add to ``tests.operatormodels``: bodies, codecs by their bits, and the runtimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeVar

import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator

from tests.operatormodels import OperatorModel, Shape
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import KINDS, Codec
from tq_onnx.codec.unrotated import RAW
from tq_onnx.codec.window import Window
from tq_onnx.ops.domain import (
    BODY_OPSET,
    DOMAIN,
    GATHER,
    RMS_NORMALIZATION,
    ROTARY_EMBEDDING,
    SWISH,
    TRANSPOSE,
)
from tq_onnx.ops.features import Feature, Features
from tq_onnx.ops.functions import decoder_function_protos, function_protos
from tq_onnx.ops.operator import Input, Operator
from tq_onnx.ops.operators import BY_NAME, Attention

Array = npt.NDArray[Any]

INT4: Final = Codec(LLOYD_MAX, 4)

#: Names of the inputs of the decoder's operators; the first has the model's floats.
INPUTS: Final = {
    RMS_NORMALIZATION: ("X", "scale"),
    ROTARY_EMBEDDING: ("X", "cos_cache", "sin_cache", "position_ids"),
    SWISH: ("X",),
    TRANSPOSE: ("X",),
    GATHER: ("data", "indices"),
}

#: Attributes of the decoder's operators that have some.
DECODER_ATTRIBUTES: Final[Mapping[str, Mapping[str, Any]]] = {
    RMS_NORMALIZATION: {"epsilon": 1e-6},
    TRANSPOSE: {"perm": [0, 2, 1, 3]},
}


def codec_of(bits: int | Codec) -> Codec:
    """A codec, or the one that has so many bits: ``lloyd_max``, and ``raw`` from 16 on."""
    if isinstance(bits, Codec):
        return bits
    return Codec(RAW if bits in KINDS[RAW].bits else LLOYD_MAX, bits)


Known = TypeVar("Known")


def codec_indices(known: Sequence[Known], **codecs: Known) -> dict[str, int]:
    """Attributes that choose a codec, or an encoder, of the body, where it knows more than one."""
    if len(known) == 1:
        return {}
    return {name: known.index(codec) for name, codec in codecs.items()}


def with_features(there: Mapping[Feature, object]) -> Features:
    """The features that are true."""
    return frozenset(feature for feature, has in there.items() if has)


def optional_inputs(features: Features, operator: type[Operator] = Attention) -> list[Input]:
    """The optional inputs of an operator that a model with these features has."""
    return [slot for slot in operator.inputs if slot.is_optional and slot.when <= features]


def window_attributes(window: Window | None) -> dict[str, int]:
    """Attributes of either operator in a model with a window; none without."""
    return {} if window is None else asdict(window)


def decoder_model(
    op: str,
    dtype: ir.DataType = ir.DataType.FLOAT,
    *,
    opset: int = BODY_OPSET,
    shapes: Mapping[str, Shape] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> onnx.ModelProto:
    """One of the decoder's operators with its body, between casts from and to float32.

    Args:
        op: name of the operator.
        dtype: of its floats.
        opset: of the model.
        shapes: of the inputs, by name; unknown where they are missing.
        attributes: of the node, where they are not ``DECODER_ATTRIBUTES``.
    """
    given = DECODER_ATTRIBUTES.get(op, {}) if attributes is None else attributes
    casts = dtype is not ir.DataType.FLOAT
    model = OperatorModel(dtype.numpy().name, shapes=shapes, as_float32=casts)
    model.operator(BY_NAME[op], given, "Y")
    return model.build(["Y"], decoder_function_protos([op]), opsets={"": opset})


def function_model(
    name: str,
    types: Mapping[str, ir.DataType],
    shapes: Mapping[str, Shape],
    output: ir.DataType,
    features: Features = frozenset(),
) -> onnx.ModelProto:
    """A model that calls one piece of the bodies, of a model with these features, on inputs."""
    model = OperatorModel(shapes=shapes)
    inputs = [model.input(each, dtype) for each, dtype in types.items()]
    model.node(name, inputs, {"result": output}, domain=DOMAIN)
    functions = function_protos([(INT4, Codec(LLOYD_MAX, 3))], features=features)
    return model.build(["result"], functions)


def run_ort(
    model: onnx.ModelProto,
    feeds: Mapping[str, Array],
    level: Any = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
) -> list[Array]:
    """onnxruntime's CPU provider, no library registered: the function bodies run."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, dict(feeds))


def run_reference_evaluator(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """onnx.reference."""
    return ReferenceEvaluator(model).run(None, dict(feeds))


RUNTIMES: Final = {"onnxruntime": run_ort, "reference evaluator": run_reference_evaluator}
