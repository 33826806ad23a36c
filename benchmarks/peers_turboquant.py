"""Our own operators: two TurboQuantEncode and one TurboQuantDequantAttention."""

from __future__ import annotations

import numpy as np
from contender import Array, Step, normal, repeated
from onnxmodel import OnnxStep, OrtPrepared

from tq_onnx.codec import reference
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.presets import PRESETS
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.ops.singleop import (
    PRESENT_CACHES,
    OperatorModel,
    attention_attributes,
    codec_constants,
    encode_attributes,
    side_names,
)
from tq_onnx.runtime.library import get_library_path, library_info

TILE = 128
"""Vectors that are really encoded; a cache holds them over and over."""


class TurboQuant:
    """One layer of a model that was converted with a preset, float32."""

    most_copies = None

    def __init__(self, preset: str) -> None:
        """Raises ``KeyError`` for a preset that does not exist."""
        self._preset = PRESETS[preset]
        self._codecs: dict[str, Codec] = {"key": self._preset.key, "value": self._preset.value}

    def version(self) -> str:
        """Of the library, with the level that it uses."""
        info = library_info()
        return f"{info.version} ({info.isa})"

    def cache_bytes(self, step: Step) -> int:
        """As the rows are."""
        widths = (row_layout(codec, step.head_size).row_bytes for codec in self._codecs.values())
        return sum(widths) * step.vectors // 2

    def prepare(self, step: Step, threads: int, copies: int) -> OrtPrepared:
        """A session with the library registered."""
        return OrtPrepared(self._model(step), threads, copies, str(get_library_path()))

    def _rows(self, role: str, head_size: int) -> Array:
        codec = self._codecs[role]
        rotation = book = None
        if codec.is_rotated:
            rotation = rotation_of(codec, self._preset.rotation, head_size, 0)
            book = codebook_of(codec, head_size)
        vectors = normal((TILE, head_size), seed=1 if role == "key" else 2)
        return reference.encode(vectors, codec, rotation, book, self._preset.norm_correction)

    def _model(self, step: Step) -> OnnxStep:
        constants: dict[str, Array] = {}
        for role, codec in self._codecs.items():
            kind = self._preset.rotation
            constants |= codec_constants(codec, step.head_size, prefix=f"{role}_", kind=kind)
        model = OperatorModel(constants=constants)
        for role, codec in self._codecs.items():
            attributes = encode_attributes(codec, norm_correction=self._preset.norm_correction)
            model.operator(Encode, attributes, f"present_{role}", names=side_names(role))
        attributes = attention_attributes(self._preset.key, self._preset.value, step.scale)
        model.operator(Attention, attributes, "output", names=PRESENT_CACHES)
        kept = (step.batch, step.kv_heads, step.context)
        caches = {}
        for role in self._codecs:
            rows = self._rows(role, step.head_size)
            content = repeated(rows, (*kept, rows.shape[-1]))
            caches[f"past_{role}"] = (f"present_{role}", content)
        answer = (step.batch, step.query_heads, step.new, step.head_size)
        new = (step.batch, step.kv_heads, step.new, step.head_size)
        return OnnxStep(
            model.build(["output", "present_key", "present_value"]).SerializeToString(),
            {
                "query": normal(answer),
                "key": normal(new, seed=1),
                "value": normal(new, seed=2),
                "past_length": np.full(step.batch, step.past, np.int64),
            },
            caches,
            (answer, np.dtype(np.float32)),
        )
