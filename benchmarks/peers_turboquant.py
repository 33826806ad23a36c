"""Our own operators: two TurboQuantEncode and one TurboQuantDequantAttention."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from contender import Array, Step, normal, repeated
from onnxmodel import OnnxStep, OrtPrepared

from tests.operatormodels import (
    PRESENT_CACHES,
    OperatorModel,
    attention_attributes,
    codec_constants,
    encode_attributes,
    side_names,
)
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.presets import PRESETS
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.search import gain_table
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.window import Window, window_of, write_entries
from tq_onnx.ops.operators import Attention, Encode, PagedAttention, PagedEncode
from tq_onnx.runtime.library import get_library_path, library_info

_OFFSETS = (Attention.key_offset, Attention.value_offset, Attention.key_frequencies)

TILE = 128
"""Vectors that are really encoded; a cache holds them over and over."""


class TurboQuant:
    """One layer of a model that was converted with a preset, float32; encoders try its gains.

    Args:
        preset: a name; ``KeyError`` for one that does not exist.
        recent: how many of the newest tokens are exact.
        sinks: how many of the first tokens are exact.
        turning: whether there are offsets, one of values, and of keys one that turns with the
            frequencies of a base of 1e6 and rows of its own for the first 4 slots.
    """

    most_copies = None

    def __init__(self, preset: str, recent: int = 0, sinks: int = 0, turning: bool = False) -> None:
        self._preset = PRESETS[preset]
        self._turning = turning
        self._codecs: dict[str, Codec] = {"key": self._preset.key, "value": self._preset.value}
        self._recent, self._sinks = recent, sinks

    def version(self) -> str:
        """Of the library, with the level that it uses."""
        info = library_info()
        return f"{info.version} ({info.isa})"

    def cache_bytes(self, step: Step) -> int:
        """As the rows are, those of the window included."""
        heads = step.batch * step.kv_heads
        slots = step.context + self._window(step.head_size).overlay_rows
        return sum(self._widths(step.head_size)) * heads * slots

    def prepare(self, step: Step, threads: int, copies: int) -> OrtPrepared:
        """A session with the library registered."""
        return OrtPrepared(self._model(step), threads, copies, str(get_library_path()))

    def _widths(self, head_size: int) -> list[int]:
        return [row_layout(codec, head_size).row_bytes for codec in self._codecs.values()]

    def _window(self, head_size: int) -> Window:
        planes = ((head_size, width) for width in self._widths(head_size))
        return window_of(self._recent, self._sinks, planes)

    def _rows(self, role: str, head_size: int) -> Array:
        codec = self._codecs[role]
        rotation = book = None
        if codec.is_rotated:
            rotation = rotation_of(codec, self._preset.rotation, head_size, 0)
            book = codebook_of(codec, head_size)
        vectors = normal((TILE, head_size), seed=1 if role == "key" else 2)
        return reference.encode(vectors, codec, rotation, book, self._preset.norm_correction)

    def _model(self, step: Step) -> OnnxStep:
        window = self._window(step.head_size)
        constants = self._constants(step.head_size) | self._offsets(step)
        exact = {} if window.entries == 0 else asdict(window)
        model = OperatorModel(constants=constants)
        for role, codec in self._codecs.items():
            attributes = encode_attributes(codec, norm_correction=self._preset.norm_correction)
            names = side_names(role)
            tables = (Encode.offset, Encode.frequencies, Encode.gains)
            optional = [table for table in tables if names[table] in constants]
            model.operator(
                Encode, attributes | exact, f"present_{role}", names=names, optional=optional
            )
        attributes = attention_attributes(self._preset.key, self._preset.value, step.scale)
        model.operator(
            Attention,
            attributes | exact,
            "output",
            names={**PRESENT_CACHES, Attention.new_keys: "key", Attention.new_values: "value"},
            optional=[
                *([Attention.new_keys, Attention.new_values] if exact else []),
                *([*_OFFSETS] if self._turning else []),
            ],
        )
        caches = {}
        for role in self._codecs:
            name = f"past_{role}"
            caches[name] = (f"present_{role}", self._cache(role, step, window))
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

    def _constants(self, head_size: int) -> dict[str, Array]:
        """Tables of both codecs, and gains where the preset searches."""
        constants: dict[str, Array] = {}
        for role, codec in self._codecs.items():
            kind = self._preset.rotation
            constants |= codec_constants(codec, head_size, prefix=f"{role}_", kind=kind)
            if codec.searches and self._preset.gains:
                constants[f"{role}_gains"] = gain_table(self._preset.gains)
        return constants

    def _offsets(self, step: Step) -> dict[str, Array]:
        if not self._turning:
            return {}
        half = step.head_size // 2
        frequencies = 1e6 ** (-np.arange(half, dtype=np.float32) / half)
        return {
            "key_offset": normal((2 + 4, step.kv_heads, step.head_size), seed=4),
            "value_offset": normal((1, step.kv_heads, step.head_size), seed=5),
            "key_frequencies": np.tile(frequencies, 2).astype(np.float32),
        }

    def _cache(self, role: str, step: Step, window: Window) -> Array:
        """A cache that holds ``past`` tokens; the entries of its window are theirs."""
        rows = self._rows(role, step.head_size)
        slots = window.overlay_rows + step.context
        content = repeated(rows, (step.batch, step.kv_heads, slots, rows.shape[-1]))
        if step.past >= window.entries:
            for first, count in ((0, window.sinks), (step.past - window.recent, window.recent)):
                vectors = normal((step.batch, step.kv_heads, count, step.head_size), seed=3)
                write_entries(content, vectors, np.full(step.batch, first, np.int64), window)
        return content


class PagedTurboQuant(TurboQuant):
    """The same layer of a paged model: a request for each sequence, its pages in any order.

    Args:
        preset: a name; ``KeyError`` for one that does not exist.
        slots: tokens of a page.
    """

    def __init__(self, preset: str, slots: int) -> None:
        super().__init__(preset)
        self._slots = slots

    def cache_bytes(self, step: Step) -> int:
        """Of whole pages."""
        tokens = self._columns(step) * self._slots
        return sum(self._widths(step.head_size)) * step.batch * step.kv_heads * tokens

    def _columns(self, step: Step) -> int:
        return -(-step.context // self._slots)

    def _model(self, step: Step) -> OnnxStep:
        constants = self._constants(step.head_size)
        model = OperatorModel(constants=constants)
        for role, codec in self._codecs.items():
            gains = [PagedEncode.gains] if f"{role}_gains" in constants else []
            model.operator(
                PagedEncode,
                encode_attributes(codec, norm_correction=self._preset.norm_correction),
                f"present_{role}",
                names={
                    PagedEncode.vectors: role,
                    PagedEncode.past: f"past_{role}",
                    PagedEncode.rotation: f"{role}_rotation",
                    PagedEncode.centroids: f"{role}_centroids",
                    PagedEncode.boundaries: f"{role}_boundaries",
                    PagedEncode.gains: f"{role}_gains",
                },
                optional=gains,
            )
        attributes = attention_attributes(self._preset.key, self._preset.value, step.scale)
        declared = {each.name for each in PagedAttention.attributes}
        model.operator(
            PagedAttention,
            {name: value for name, value in attributes.items() if name in declared},
            "output",
            names={
                PagedAttention.key_cache: "present_key",
                PagedAttention.value_cache: "present_value",
            },
        )
        caches = {}
        for role in self._codecs:
            rows = self._rows(role, step.head_size)
            pages = (step.batch * self._columns(step), self._slots, step.kv_heads, rows.shape[-1])
            caches[f"past_{role}"] = (f"present_{role}", repeated(rows, pages))
        tokens = step.batch * step.new
        answer = (1, step.query_heads, tokens, step.head_size)
        new = (1, step.kv_heads, tokens, step.head_size)
        order = np.random.default_rng(1).permutation(step.batch * self._columns(step))
        return OnnxStep(
            model.build(["output", "present_key", "present_value"]).SerializeToString(),
            {
                "query": normal(answer),
                "key": normal(new, seed=1),
                "value": normal(new, seed=2),
                "cumulative_sequence_length": np.arange(0, tokens + 1, step.new, dtype=np.int32),
                "past_seqlens": np.full(step.batch, step.past, np.int32),
                "block_table": order.reshape(step.batch, -1).astype(np.int32),
            },
            caches,
            (answer, np.dtype(np.float32)),
        )
