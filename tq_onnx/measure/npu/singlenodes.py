"""Models of one node of ours, with the tables that a conversion would bake into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.codebook import Codebook, codebook_of
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import Codec
from tq_onnx.ops.domain import ATTENTION, BODY_OPSET, DOMAIN, ENCODE, VERSION

Array = npt.NDArray[Any]

INT4: Final = Codec(LLOYD_MAX, 4)
"""The codec of the kernels for CANN."""

_IR_VERSION: Final = 9


class Tables:
    """Rotations and codebook for one head size, the same in all runs.

    Args:
        head_size: D.
    """

    def __init__(self, head_size: int) -> None:
        self.codebook: Codebook = codebook_of(INT4, head_size)
        self.rotations: tuple[Array, Array] = (
            make_rotation("qr", head_size, 0),
            make_rotation("qr", head_size, 1),
        )


def encode_model(tables: Tables, dtype: str) -> bytes:
    """TurboQuantEncode of ``vectors`` into ``past``, to ``present``."""
    book = tables.codebook
    return single_node(
        ENCODE,
        {"vectors": dtype, "past": "uint8", "past_length": "int64"},
        {
            "rotation": tables.rotations[0],
            "centroids": book.centroids,
            "boundaries": book.boundaries,
        },
        ("present", "uint8"),
        {"codec": INT4.kind, "bits": INT4.bits, "norm_correction": 1},
    )


def attention_model(tables: Tables, dtype: str, scale: float) -> bytes:
    """TurboQuantDequantAttention of ``query`` over ``keys`` and ``values``, to ``output``."""
    centroids = tables.codebook.centroids
    codec = {"key_codec": INT4.kind, "value_codec": INT4.kind}
    bits = {"key_bits": INT4.bits, "value_bits": INT4.bits}
    return single_node(
        ATTENTION,
        {"query": dtype, "keys": "uint8", "values": "uint8", "past_length": "int64"},
        {
            "key_rotation": tables.rotations[0],
            "key_centroids": centroids,
            "value_rotation": tables.rotations[1],
            "value_centroids": centroids,
        },
        ("output", dtype),
        {"scale": scale, "causal": 1, "sliding_window": 0, "softcap": 0.0, **codec, **bits},
    )


def single_node(
    op_type: str,
    inputs: Mapping[str, str],
    constants: Mapping[str, Array],
    output: tuple[str, str],
    attributes: Mapping[str, Any] | None = None,
) -> bytes:
    """A model of one node.

    Args:
        op_type: one of our operators.
        inputs: element types as numpy calls them, by name; the node's first inputs.
        constants: the node's other inputs.
        output: name and element type.
        attributes: of the node.

    Returns:
        The serialised model.
    """
    values = {name: _value(name, dtype) for name, dtype in inputs.items()}
    baked = []
    for name, array in constants.items():
        value = _value(name, array.dtype.name)
        value.const_value = ir.tensor(array, name=name)
        value.shape = ir.Shape(array.shape)
        baked.append(value)
    made = _value(*output)
    node = ir.node(
        op_type,
        [*values.values(), *baked],
        dict(attributes or {}),
        domain=DOMAIN,
        outputs=[made],
        name=op_type,
    )
    graph = ir.Graph(
        list(values.values()),
        [made],
        nodes=[node],
        initializers=baked,
        opset_imports={"": BODY_OPSET, DOMAIN: VERSION},
        name="one_operator",
    )
    model: bytes = ir.to_proto(ir.Model(graph, ir_version=_IR_VERSION)).SerializeToString()
    return model


def _value(name: str, dtype: str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype))))
