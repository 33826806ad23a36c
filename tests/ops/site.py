"""One attention layer with its encoders: its model, inputs for it, and what the oracle says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from tests.operatormodels import (
    PRESENT_CACHES,
    OperatorModel,
    attention_attributes,
    codec_constants,
    encode_attributes,
    side_names,
)
from tests.singleop import (
    INT4,
    codec_indices,
    codec_of,
    optional_inputs,
    window_attributes,
    with_features,
)
from tq_onnx.codec import reference, spec
from tq_onnx.codec.codebook import Codebook, codebook_of
from tq_onnx.codec.feedback import feedback_of
from tq_onnx.codec.kind import NORM_KEPT, Tables
from tq_onnx.codec.presets import QR
from tq_onnx.codec.quantise import tables_of
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.search import gain_table
from tq_onnx.codec.spec import Codec, RowLayout, row_layout
from tq_onnx.codec.window import NO_WINDOW, Window
from tq_onnx.ops.domain import BODY_OPSET
from tq_onnx.ops.features import (
    ATTENTION_BIAS,
    EXACT_WINDOW,
    FEEDBACK,
    GAINS,
    HEAD_SINK,
    LEFT_PADDING,
    OFFSETS,
    ROTARY_OFFSETS,
    SPARE_ROWS,
    Features,
)
from tq_onnx.ops.functions import body_codecs, body_encoders, function_protos
from tq_onnx.ops.operators import Attention, Encode

Arrays = dict[str, np.ndarray[Any, Any]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

NONE = np.zeros(1, np.float32)
"""What stands for tables that a codec does without."""

OUTPUTS = ("attended", "present_key", "present_value")
ATTRIBUTES: dict[str, Any] = {"scale": 0.1, "causal": 1, "sliding_window": 0, "softcap": 0.0}


@cache
def _rotation(codec: Codec, kind: str, head_size: int, layer: int) -> Floats:
    """The table of a side."""
    return rotation_of(codec, kind, head_size, layer) if codec.is_rotated else NONE


@cache
def _feedback(site: Site) -> Floats:
    """Matrices of error feedback for queries that are strong in a few directions."""
    size = site.head_size
    queries = np.random.RandomState(9).standard_normal((site.kv_heads, 2 * size, size))
    queries *= np.geomspace(3, 0.2, size)
    return feedback_of(queries.swapaxes(-1, -2) @ queries, site.key_rotation)


INT3 = codec_of(3)
INT2 = codec_of(2)
FLOATS = codec_of(32)

CODECS = [codec for codec in spec.CODECS if not codec.is_raw]
"""All that quantise."""


@dataclass(frozen=True)
class Site:
    """One attention layer: encoders of key and value, and attention over both caches.

    Inputs that are floats enter as float32 and are cast to ``dtype`` inside, because numpy has no
    bfloat16; the output is cast back. ``others`` are codecs of other layers that the bodies must
    know; caches have ``spare_bytes`` behind their rows. With ``frequencies`` the offset of the keys
    turns, and has a row more; one frequency is none. Encoders try so many ``gains``, 0 for none,
    and keys are coded with error feedback if it ``feeds_back``.
    """

    key: Codec = INT4
    value: Codec = INT4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    dtype: ir.DataType = ir.DataType.FLOAT
    has_bias: bool = False
    has_sink: bool = False
    has_padding: bool = False
    offset_rows: int = 0
    frequencies: tuple[float, ...] = ()
    spare_bytes: int = 0
    others: tuple[tuple[Codec, Codec], ...] = ()
    norm_correction: int = NORM_KEPT
    rotation: str = QR
    gains: int = 0
    feeds_back: bool = False
    opset: int = BODY_OPSET
    window: Window | None = None

    @property
    def pairs(self) -> tuple[tuple[Codec, Codec], ...]:
        return (*self.others, (self.key, self.value))

    @property
    def features(self) -> Features:
        return with_features(
            {
                ATTENTION_BIAS: self.has_bias,
                HEAD_SINK: self.has_sink,
                OFFSETS: self.offset_rows,
                ROTARY_OFFSETS: self.frequencies,
                EXACT_WINDOW: self.window is not None,
                SPARE_ROWS: self.window is not None and self.window.takes_spare_rows,
                LEFT_PADDING: self.has_padding,
                GAINS: self.gains or self.feeds_back,
                FEEDBACK: self.feeds_back,
            }
        )

    @property
    def key_rotation(self) -> Floats:
        return _rotation(self.key, self.rotation, self.head_size, 0)

    @property
    def value_rotation(self) -> Floats:
        return _rotation(self.value, self.rotation, self.head_size, 1)

    def offset(self, name: str) -> Floats:
        """Of the keys or the values; a constant of the model."""
        rng = np.random.default_rng(len(name))
        turns = name == "key" and len(self.frequencies) > 1
        shape = (self.offset_rows + turns, self.kv_heads, self.head_size)
        return (2 * rng.standard_normal(shape)).astype(np.float32)

    @property
    def offsets(self) -> dict[str, Any]:
        """What the oracle's attention knows of offsets."""
        if not self.offset_rows:
            return {}
        made = {f"{side}_offset": self.offset(side) for side in ("key", "value")}
        return {**made, "key_frequencies": self.turning("key")}

    def turning(self, name: str) -> Floats | None:
        """Frequencies of the keys, or of the values, which have none."""
        if not self.frequencies:
            return None
        return np.float32(self.frequencies) if name == "key" else NONE

    def centered(self, feeds: Arrays, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """New keys or values, less their offsets."""
        vectors = feeds[name].astype(np.float64)
        if not self.offset_rows:
            return vectors
        return vectors - self.taken(feeds, name, self.offset(name))

    def taken(self, feeds: Arrays, name: str, offset: np.ndarray[Any, Any]) -> Any:
        """The offsets of new keys or values."""
        batch, _, new, _ = feeds[name].shape
        turning = {
            "frequencies": self.turning(name),
            "left_padding": feeds.get("left_padding"),
        }
        return reference.offset_rows(offset, feeds["past_length"], batch, new, **turning)

    def layout(self, codec: Codec) -> RowLayout:
        return row_layout(codec, self.head_size)

    def width(self, codec: Codec) -> int:
        """Bytes of a row of the cache."""
        return self.layout(codec).row_bytes + self.spare_bytes

    @property
    def element(self) -> str:
        return str(self.dtype.numpy().name)

    def codebook(self, codec: Codec) -> Codebook:
        return codebook_of(codec, self.head_size) if codec.is_rotated else Codebook(NONE, NONE, 0.0)

    def search(self, side: str) -> dict[str, Any]:
        """What the encoder of a side searches with: gains, and feedback; None for none."""
        codec = self.key if side == "key" else self.value
        feeds = self.feeds_back and side == "key"
        count = max(self.gains, 1)
        given = self.gains or self.feeds_back
        return {
            "gains": gain_table(count, is_signed=codec.is_signed) if given else None,
            "feedback": _feedback(self) if feeds else None,
        }

    def tables(self, side: str) -> Tables:
        """What a judge of the rows of a side needs."""
        codec = self.key if side == "key" else self.value
        turn = self.key_rotation if side == "key" else self.value_rotation
        book = self.codebook(codec)
        return tables_of(codec, turn, book, self.norm_correction, **self.search(side))

    def model(self, *, outputs: Sequence[str] = OUTPUTS, **attributes: Any) -> onnx.ModelProto:
        """The model, function bodies included; ``attributes`` override those of ATTRIBUTES."""
        build = OperatorModel(
            self.element, constants=self.constants, shapes=self.shapes, as_float32=True
        )
        known = body_codecs(self.pairs)
        encoders = body_encoders(self.pairs, self.feeds_back)
        for side, codec in (("key", self.key), ("value", self.value)):
            if f"present_{side}" not in outputs:
                continue
            encoder = codec, side == "key" and self.feeds_back
            build.operator(
                Encode,
                {
                    **encode_attributes(codec, norm_correction=self.norm_correction),
                    **codec_indices(encoders, codec_index=encoder),
                    **window_attributes(self.window),
                },
                f"present_{side}",
                names=side_names(side),
                optional=optional_inputs(self.features, Encode),
            )
        if "attended" in outputs:
            build.operator(
                Attention,
                {
                    **attention_attributes(self.key, self.value, 0.0),
                    **ATTRIBUTES,
                    **attributes,
                    **codec_indices(known, key_codec_index=self.key, value_codec_index=self.value),
                    **window_attributes(self.window),
                },
                "attended",
                names={**PRESENT_CACHES, Attention.new_keys: "key", Attention.new_values: "value"},
                optional=optional_inputs(self.features),
            )
        functions = function_protos(
            self.pairs,
            features=self.features,
            element=self.element,
        )
        return build.build(outputs, functions, opsets={"": self.opset})

    @property
    def constants(self) -> Arrays:
        """Rotations, codebooks and offsets."""
        made: Arrays = {}
        for layer, (side, codec) in enumerate((("key", self.key), ("value", self.value))):
            made |= codec_constants(codec, self.head_size, prefix=f"{side}_", layer=layer)
            made[f"{side}_rotation"] = getattr(self, f"{side}_rotation")
            for name, table in self.search(side).items():
                made[f"{side}_{name}"] = NONE if table is None else table
            if self.offset_rows:
                made[f"{side}_offset"] = self.offset(side)
            turning = self.turning(side)
            if turning is not None:
                made[f"{side}_frequencies"] = turning
        return made

    @property
    def shapes(self) -> dict[str, list[int | str]]:
        """Of inputs and outputs."""
        queries: list[int | str] = ["B", self.heads, "T", self.head_size]
        made: dict[str, list[int | str]] = {"query": queries, "attended": queries}
        for side, codec in (("key", self.key), ("value", self.value)):
            made[side] = ["B", self.kv_heads, "T", self.head_size]
            made[f"past_{side}"] = ["B", self.kv_heads, "P", self.width(codec)]
            made[f"present_{side}"] = ["B", self.kv_heads, "S", self.width(codec)]
        rest = {"past_length": ["lengths"], "attention_bias": [*"abcd"], "head_sink": [self.heads]}
        return {**made, **rest, "left_padding": ["padded"]}

    def feeds(
        self,
        rng: np.random.Generator,
        *,
        past_length: tuple[int, ...] = (0,),
        new: int = 1,
        capacity: int | None = None,
        batch: int | None = None,
    ) -> Arrays:
        """Random inputs; capacity defaults to the longest past. Bias, if any, is the caller's."""
        batch = batch or len(past_length)
        rows = max(past_length) if capacity is None else capacity
        shape = (batch, self.kv_heads, new, self.head_size)
        arrays: Arrays = {
            "query": rng.standard_normal((batch, self.heads, new, self.head_size)),
            "key": rng.standard_normal(shape) * 3,
            "value": rng.standard_normal(shape),
        }
        arrays = {name: self.rounded(array) for name, array in arrays.items()}
        for name, codec, rotation in (
            ("past_key", self.key, self.key_rotation),
            ("past_value", self.value, self.value_rotation),
        ):
            vectors = rng.standard_normal((batch, self.kv_heads, rows, self.head_size))
            past = reference.encode(
                vectors, codec, rotation, self.codebook(codec), element=self.element
            )
            arrays[name] = self.widened(past)
        arrays["past_length"] = np.array(past_length, np.int64)
        return arrays

    def widened(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Rows with the spare bytes of the cache behind them."""
        return np.pad(rows, [(0, 0)] * 3 + [(0, self.spare_bytes)])

    def rounded(self, array: np.ndarray[Any, Any]) -> Floats:
        """float32 values that the element type holds exactly."""
        return array.astype(self.dtype.numpy()).astype(np.float32)

    def expected(self, feeds: Arrays, **attributes: Any) -> tuple[np.ndarray[Any, Any], ...]:
        """What the oracle says: output float64, present_key, present_value."""
        presents = self.expected_presents(feeds)
        return (self.attended(feeds, *presents, **attributes), *presents)

    def expected_presents(self, feeds: Arrays) -> list[np.ndarray[Any, Any]]:
        """The caches that the oracle makes."""
        presents = []
        for name, codec, rotation in (
            ("key", self.key, self.key_rotation),
            ("value", self.value, self.value_rotation),
        ):
            rows = reference.encode(
                self.centered(feeds, name),
                codec,
                rotation,
                self.codebook(codec),
                self.norm_correction,
                **self.search(name),
                element=self.element,
            )
            past = feeds[f"past_{name}"]
            presents.append(
                reference.append(
                    past,
                    self.widened(rows),
                    feeds["past_length"],
                    window=self.window or NO_WINDOW,
                    vectors=feeds[name],
                )
            )
        return presents

    def attended(
        self, feeds: Arrays, key_cache: Any, value_cache: Any, **attributes: Any
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Float64 attention over given caches."""
        options = ATTRIBUTES | attributes
        bias, sink = feeds.get("attention_bias"), feeds.get("head_sink")
        return reference.attention(
            feeds["query"],
            key_cache,
            value_cache,
            feeds["past_length"],
            key=self.key,
            value=self.value,
            key_rotation=self.key_rotation,
            key_codebook=self.codebook(self.key).centroids,
            value_rotation=self.value_rotation,
            value_codebook=self.codebook(self.value).centroids,
            attention_bias=None if bias is None else bias.astype(self.dtype.numpy()),
            head_sink=sink,
            **self.offsets,
            scale=options["scale"],
            causal=bool(options["causal"]),
            sliding_window=options["sliding_window"],
            softcap=options["softcap"],
            element=self.element,
            window=self.window or NO_WINDOW,
            new_keys=feeds["key"],
            new_values=feeds["value"],
            left_padding=feeds.get("left_padding"),
        )
