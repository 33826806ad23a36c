"""Our own operators: two TurboQuantEncode and one TurboQuantDequantAttention."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from contender import Array, Step, normal, repeated
from onnxmodel import OnnxStep, OrtPrepared, constant, model, value

from tq_onnx.codec import reference
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.presets import PRESETS
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.ops.domain import ATTENTION, DOMAIN, ENCODE, VERSION
from tq_onnx.runtime.library import get_library_path, library_info

F32, U8, I64 = ir.DataType.FLOAT, ir.DataType.UINT8, ir.DataType.INT64
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

    def _tables(self, role: str, head_size: int) -> tuple[ir.Value, ir.Value, ir.Value]:
        codec = self._codecs[role]
        names = [f"{role}_{table}" for table in ("rotation", "centroids", "boundaries")]
        arrays: list[Array] = [np.zeros(1, np.float32)] * 3
        if codec.is_rotated:
            book = codebook_of(codec, head_size)
            rotation = rotation_of(codec, self._preset.rotation, head_size, 0)
            arrays = [rotation, book.centroids, book.boundaries]
        first, second, third = map(constant, names, arrays)
        return first, second, third

    def _rows(self, role: str, head_size: int) -> Array:
        codec = self._codecs[role]
        rotation = book = None
        if codec.is_rotated:
            rotation = rotation_of(codec, self._preset.rotation, head_size, 0)
            book = codebook_of(codec, head_size)
        vectors = normal((TILE, head_size), seed=1 if role == "key" else 2)
        return reference.encode(vectors, codec, rotation, book, self._preset.norm_correction)

    def _model(self, step: Step) -> OnnxStep:
        inputs = {name: value(name, F32, 4) for name in ("query", "key", "value")}
        inputs |= {name: value(name, U8, 4) for name in ("past_key", "past_value")}
        inputs["past_length"] = value("past_length", I64, 1)
        tables = {role: self._tables(role, step.head_size) for role in self._codecs}
        nodes: list[ir.Node] = []
        read: list[ir.Value] = []
        attributes: dict[str, str | int | float] = {
            "scale": step.scale,
            "causal": 1,
            "sliding_window": 0,
            "softcap": 0.0,
        }
        for role, codec in self._codecs.items():
            corrects = self._preset.norm_correction and codec.corrects_norm
            nodes.append(
                ir.node(
                    ENCODE,
                    [inputs[role], inputs[f"past_{role}"], inputs["past_length"], *tables[role]],
                    {"codec": codec.kind, "bits": codec.bits, "norm_correction": int(corrects)},
                    domain=DOMAIN,
                    version=VERSION,
                )
            )
            read += tables[role][:2]
            attributes |= {f"{role}_codec": codec.kind, f"{role}_bits": codec.bits}
        presents = [node.outputs[0] for node in nodes]
        nodes.append(
            ir.node(
                ATTENTION,
                [inputs["query"], *presents, inputs["past_length"], *read],
                attributes,
                domain=DOMAIN,
                version=VERSION,
            )
        )
        kept = (step.batch, step.kv_heads, step.context)
        caches = {}
        for role in self._codecs:
            rows = self._rows(role, step.head_size)
            content = repeated(rows, (*kept, rows.shape[-1]))
            caches[f"past_{role}"] = (f"present_{role}", content)
        answer = (step.batch, step.query_heads, step.new, step.head_size)
        new = (step.batch, step.kv_heads, step.new, step.head_size)
        return OnnxStep(
            model(
                list(inputs.values()),
                nodes,
                [
                    (nodes[2].outputs[0], "output", F32),
                    (presents[0], "present_key", U8),
                    (presents[1], "present_value", U8),
                ],
                [table for role in self._codecs for table in tables[role]],
                opsets={"": 18, DOMAIN: VERSION},
            ),
            {
                "query": normal(answer),
                "key": normal(new, seed=1),
                "value": normal(new, seed=2),
                "past_length": np.full(step.batch, step.past, np.int64),
            },
            caches,
            (answer, np.dtype(np.float32)),
        )
