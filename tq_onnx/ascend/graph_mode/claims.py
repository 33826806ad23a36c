"""Know what CANNExecutionProvider hands to CANN as graphs (``enable_cann_graph=1``).

Read off onnxruntime-cann 1.24.4, where it is a list of operator names of the default domain; types,
attributes and versions are not looked at there, CANN's parser does that later. Nodes of other names
cut the graph: what lies before and behind them are subgraphs of their own, compiled one by one, and
every value between is copied to the host and back. So does a node whose inputs are all
initializers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.values import label

CLAIMED: Final = frozenset(
    {
        *("Abs", "Acos", "Acosh", "Add", "And", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan"),
        *("Atanh", "AveragePool", "BatchNormalization", "BitShift", "Cast", "Ceil", "Celu"),
        *("Clip", "Compress", "Concat", "Constant", "ConstantOfShape", "Conv"),
        *("ConvTranspose", "Cos", "Cosh", "CumSum", "DepthToSpace", "Det", "Div", "Dropout"),
        *("Elu", "Equal", "Erf", "Exp", "Expand", "EyeLike", "Flatten", "Floor", "Gather"),
        *("GatherElements", "GatherND", "Gemm", "GlobalAveragePool", "GlobalLpPool"),
        *("GlobalMaxPool", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish"),
        *("Hardmax", "Identity", "InstanceNormalization", "LRN", "LSTM", "LeakyRelu", "Less"),
        *("LessOrEqual", "Log", "LogSoftmax", "LpNormalization", "LpPool", "MatMul", "Max"),
        *("MaxPool", "MaxRoiPool", "MaxUnpool", "Mean", "MeanVarianceNormalization", "Min"),
        *("Mod", "Mul", "Multinomial", "Neg", "NonMaxSuppression", "NonZero", "Not"),
        *("OneHot", "Or", "PRelu", "Pad", "Pow", "RandomNormalLike", "RandomUniform"),
        *("RandomUniformLike", "Range", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSum"),
        *("ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"),
        *("ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "Resize", "ReverseSequence"),
        *("RoiAlign", "Round", "Scatter", "ScatterElements", "ScatterND", "Selu", "Shape"),
        *("Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Size", "Slice", "Softmax"),
        *("SoftmaxCrossEntropyLoss", "Softplus", "Softsign", "SpaceToDepth", "Split", "Sqrt"),
        *("Squeeze", "Sub", "Sum", "Tanh", "TfIdfVectorizer", "ThresholdedRelu", "Tile"),
        *("TopK", "Transpose", "Unsqueeze", "Where", "Xor"),
    }
)


def left_over(model: ir.Model) -> Iterator[str]:
    """Yield a clause for each node that would cut the graph."""
    for node in model.graph:
        name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        if node.domain != "" or node.op_type not in CLAIMED:
            yield f"{label(node)} ({name}) is not an operator that the provider supports"
        elif all(value is None or value.is_initializer() for value in node.inputs):
            yield f"{label(node)} ({name}) has constants for inputs only"


def not_static(model: ir.Model) -> Iterator[str]:
    """Yield the values whose sizes are not all numbers: a clause for each."""
    for node in model.graph:
        for value in node.outputs:
            if value.shape is None or not value.shape.is_static():
                yield f"{value.name} of {label(node)} ({node.op_type}) is {value.shape}"
