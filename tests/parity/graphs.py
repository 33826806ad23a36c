"""Models of single operators, with their function bodies, as a converted model carries them.

Rotations are those of layer 0 for keys and of layer 1 for values, so that mixing them up shows.
A bfloat16 graph takes and gives float32, with casts around the operator: numpy has no bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tests.operatormodels import (
    PRESENT_CACHES,
    OperatorModel,
    attention_attributes,
    codec_constants,
    encode_attributes,
    side_names,
)
from tests.singleop import codec_indices, codec_of, optional_inputs, with_features
from tq_onnx.codec.codebook import Codebook, codebook_of
from tq_onnx.codec.feedback import feedback_of
from tq_onnx.codec.kind import NORM_KEPT
from tq_onnx.codec.presets import QR
from tq_onnx.codec.rotation import make_rotation, rotation_of
from tq_onnx.codec.search import gain_table
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.ops import operators
from tq_onnx.ops.features import (
    ATTENTION_BIAS,
    FEEDBACK,
    GAINS,
    HEAD_SINK,
    LEFT_PADDING,
    OFFSETS,
    Features,
)
from tq_onnx.ops.functions import body_codecs, body_encoders, function_protos
from tq_onnx.ops.operator import Input

KEY_LAYER, VALUE_LAYER = 0, 1


@dataclass(frozen=True)
class Attention:
    """Everything about an attention node that is fixed in the graph."""

    head_size: int = 64
    key_bits: int | Codec = 4
    value_bits: int | Codec = 4
    dtype: str = "float32"
    scale: float = 0.125
    causal: bool = True
    sliding_window: int = 0
    softcap: float = 0.0
    has_bias: bool = False
    has_sink: bool = False
    has_offset: bool = False
    has_left_padding: bool = False
    rotation: str = QR
    norm_correction: int = NORM_KEPT
    gains: int = 0  # that encoders try; 0 for none
    feedback_heads: int = 0  # KV heads, where keys are coded with error feedback
    padding: int = 0  # bytes of a cache's rows behind those of the codec

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the node, but for what chooses its codecs in the body."""
        return attention_attributes(self.key, self.value, self.scale) | {
            "causal": int(self.causal),
            "sliding_window": self.sliding_window,
            "softcap": self.softcap,
        }

    @property
    def features(self) -> Features:
        return with_features(
            {
                ATTENTION_BIAS: self.has_bias,
                HEAD_SINK: self.has_sink,
                OFFSETS: self.has_offset,
                LEFT_PADDING: self.has_left_padding,
                GAINS: self.gains,
                FEEDBACK: self.feedback_heads,
            }
        )

    @property
    def key(self) -> Codec:
        return codec_of(self.key_bits)

    @property
    def value(self) -> Codec:
        return codec_of(self.value_bits)


def rotation(head_size: int, layer: int) -> np.ndarray:
    return _rotation(head_size, layer)


@cache
def _rotation(head_size: int, layer: int) -> np.ndarray:
    return make_rotation(QR, head_size, layer)


@cache
def tables(
    codec: Codec, head_size: int, layer: int, kind: str = QR
) -> tuple[np.ndarray | None, Codebook | None]:
    """Rotation and codebook of a codec; None where it has none."""
    if not codec.is_rotated:
        return None, None
    return rotation_of(codec, kind, head_size, layer), codebook_of(codec, head_size)


def _model(spec: Attention, parts: Sequence[str]) -> bytes:
    """The encoders of these sides, and the attention if it is among them; in this order."""
    codecs = {"key": spec.key, "value": spec.value}
    constants: dict[str, np.ndarray] = {}
    shapes: dict[str, list[str | int]] = {
        "past_length": ["L"],
        "query": ["B", "H", "T", spec.head_size],
        "output": ["B", "H", "T", spec.head_size],
        "attention_bias": ["B1", "H1", "T1", "S1"],
        "head_sink": ["H"],
        "left_padding": ["P"],
    }
    for layer, (side, codec) in zip((KEY_LAYER, VALUE_LAYER), codecs.items(), strict=True):
        size = spec.head_size
        constants |= codec_constants(
            codec, size, prefix=f"{side}_", kind=spec.rotation, layer=layer
        )
        width = row_layout(codec, size).row_bytes + spec.padding
        shapes[side] = ["B", "N", "T", size]
        shapes[f"{side}_offset"] = ["O", "N", size]
        constants[f"{side}_gains"] = gain_table(max(spec.gains, 1), is_signed=codec.is_signed)
        feeds = side == "key" and spec.feedback_heads
        constants[f"{side}_feedback"] = (
            feedback(size, spec.feedback_heads) if feeds else np.zeros(1, np.float32)
        )
        for name, slots in (("past_{}", "P"), ("present_{}", "S"), ("{}_cache", "S")):
            shapes[name.format(side)] = ["B", "N", slots, width]
    model = OperatorModel(
        spec.dtype, constants=constants, shapes=shapes, as_float32=spec.dtype == "bfloat16"
    )
    pairs = [(spec.key, spec.value)]
    known = body_codecs(pairs)
    encoders = body_encoders(pairs, spec.feedback_heads > 0)
    encoded = [side for side in codecs if side in parts]
    for side in encoded:
        model.operator(
            operators.Encode,
            encode_attributes(codecs[side], norm_correction=spec.norm_correction)
            | codec_indices(
                encoders,
                codec_index=(codecs[side], side == "key" and spec.feedback_heads > 0),
            ),
            f"present_{side}",
            names=side_names(side),
            optional=_optional(spec),
        )
    if "attention" in parts:
        indices = codec_indices(known, key_codec_index=spec.key, value_codec_index=spec.value)
        model.operator(
            operators.Attention,
            spec.attributes | indices,
            "output",
            names=PRESENT_CACHES if encoded else {},
            optional=optional_inputs(spec.features),
        )
    functions = function_protos(
        pairs,
        features=spec.features,
        element=spec.dtype,
    )
    outputs = ["output"] if "attention" in parts else []
    outputs += [f"present_{side}" for side in encoded]
    return model.build(outputs, functions).SerializeToString()


def _optional(spec: Attention) -> list[Input]:
    """The optional inputs that encoders have."""
    encode = operators.Encode
    has = {
        encode.offset: spec.has_offset,
        encode.gains: spec.gains > 0 or spec.feedback_heads > 0,
        encode.feedback: spec.feedback_heads > 0,
    }
    return [each for each, is_there in has.items() if is_there]


@cache
def feedback(head_size: int, heads: int) -> np.ndarray:
    """Matrices of error feedback for queries that are strong in a few directions."""
    queries = np.random.RandomState(9).standard_normal((heads, 2 * head_size, head_size))
    queries *= np.geomspace(3, 0.2, head_size)
    moments = queries.swapaxes(-1, -2) @ queries
    return feedback_of(moments, rotation(head_size, KEY_LAYER))


@cache
def encode_model(
    side: str,
    bits: int | Codec,
    head_size: int,
    dtype: str,
    *,
    norm_correction: int = NORM_KEPT,
    gains: int = 0,
    feedback_heads: int = 0,
) -> bytes:
    """Inputs: side, past_<side>, past_length. Output: present_<side>."""
    spec = Attention(
        head_size,
        bits,
        bits,
        dtype,
        norm_correction=norm_correction,
        gains=gains,
        feedback_heads=feedback_heads,
    )
    return _model(spec, [side])


@cache
def attention_model(spec: Attention) -> bytes:
    """Inputs: key_cache, value_cache, past_length, query, attention_bias?, head_sink?,
    left_padding?, and key_offset and value_offset if they are there.

    Output: output.
    """
    return _model(spec, ["attention"])


@cache
def step_model(spec: Attention) -> bytes:
    """One layer's decode step: both encoders, and attention over what they wrote.

    Inputs: key, past_key, past_length, value, past_value, query, and the optional ones of
    ``attention_model``. Outputs: output, present_key, present_value.
    """
    return _model(spec, ["key", "value", "attention"])
