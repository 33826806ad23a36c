"""Hold the plan of a conversion: what is done to each layer, as frozen, JSON-able data.

``make_plan`` turns what was recognised (``tq_onnx.recognise.match``) and what the user asked for
into a ``Plan``. The plan is written into the converted model's metadata, where the runtime finds
the names of its inputs, outputs and caches, and where ``inspect`` finds what was done. This module
imports neither onnx nor onnx-ir, so that the runtime can read a plan without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache
from itertools import zip_longest
from math import isfinite
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from tq_onnx.codec.elements import ELEMENTS
from tq_onnx.codec.kind import NORM_CORRECTIONS, NOT_CORRECTED
from tq_onnx.codec.pagewindow import PageWindow
from tq_onnx.codec.planes import field_bytes
from tq_onnx.codec.search import MAX_GAINS
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.window import MAX_ENTRIES, Window, rows_of_entries
from tq_onnx.errors import ModelFileError, UnsupportedModelError

METADATA_PLAN: Final = "tq_onnx.plan"
METADATA_FIRST_PLAN: Final = "tq_onnx.plan.first"
"""Of the graph for first prompts, in a file that holds that and the one that goes on."""
METADATA_VERSION: Final = "tq_onnx.version"
METADATA_PRESET: Final = "tq_onnx.preset"
METADATA_DIGEST: Final = "tq_onnx.layout_digest"

VISIBLE: Final = "visible"
PAST_LENGTH: Final = "past_length"
TOTAL_LENGTH: Final = "total_length"
NEW_LENGTHS: Final = "new_lengths"
CACHE_POSITIONS: Final = "cache_positions"
LOGITS_TO_KEEP: Final = "logits_to_keep"
IGNORED: Final = "ignored"
ENCODER: Final = "encoder"

Role = Literal["key", "value"]
ROLES: Final[tuple[Role, Role]] = ("key", "value")
"""What a cache holds."""

PLAN_VERSION: Final = 5
"""Of the JSON; plans of other versions are refused."""

_MOST: Final = 1 << 63
_MESSAGE: Final = 80

CPU: Final = "cpu"
"""The target that every plan begins with, and the provider that runs every model."""

CUMULATIVE_LENGTHS: Final = "cumulative_sequence_lengths"
PAST_LENGTHS: Final = "past_sequence_lengths"
BLOCK_TABLE: Final = "block_table"
PACKING: Final = (CUMULATIVE_LENGTHS, PAST_LENGTHS, BLOCK_TABLE)
"""Inputs of a model whose caches lie in pages: where each request's tokens begin among the packed
ones, and where the last ends, int32 ``[R + 1]``; tokens in its pages, int32 ``[R]``; the numbers of
its pages, int32 ``[R, C]``. The engine of onnxruntime-genai calls them so."""
LOGITS_INDICES: Final = "logits_indices"
"""Its input of the packed tokens that logits are computed of, int32 ``[L]``: the last ones of
requests, or several where an engine checks draft tokens."""


@dataclass(frozen=True)
class ExtraInput:
    """A further input that a decoder can be given without knowing the model.

    Attributes:
        name: the graph input.
        role: ``visible``, ``[B, 1, T, S]``, which keys each query sees: bool, or floats to add;
            ``past_length``, tokens in the caches before a call, integers ``[]``, ``[1]`` or
            ``[B]``; ``total_length``, the same after it; ``new_lengths``, the new tokens of each
            sequence without padding, integers ``[B]``; ``cache_positions``, where the new tokens go
            in the caches, integers ``[T]``; ``logits_to_keep``, how many of the last tokens get
            logits; ``ignored``, neither logits nor caches depend on it; ``encoder``, what an
            encoder makes of another text, a sound or an image: hidden states ``[B, E, hidden]``,
            keys and values ``[B, N, E, D]``, or a mask ``[B, E]``.
    """

    name: str
    role: str


@dataclass(frozen=True)
class CachePair:
    """A cache: the graph input it is read from and the graph output it leaves by.

    Attributes:
        past: None in a graph for a first prompt, which takes no caches.
        present: the output.
    """

    past: str | None
    present: str


@dataclass(frozen=True)
class CachePlan(CachePair):
    """One cache of a layer, of keys or of values: its names, and what its rows are.

    Attributes:
        codec: how a vector becomes a row.
        row_bytes: W in the graph, which may be more than the codec needs.
        size: numbers in a head as the original has them; where they are fewer than D, rows have
            zeros behind them.
        feedback: whether vectors are coded with error feedback, which changes no meaning of a row.
        rotary: whether the offset that is taken from vectors turns with their slots.
    """

    codec: Codec
    row_bytes: int
    size: int
    feedback: bool = False
    rotary: bool = False


@dataclass(frozen=True)
class Interface:
    """Names of a decoder's inputs and outputs apart from its caches.

    Attributes:
        tokens: the token ids ``[B, T]`` integers, or their embeddings ``[B, T, hidden]`` floats.
        attention_mask: ``[B, total]`` int64, ones for tokens that count; None if there is none.
        position_ids: ``[B, T]`` int64; None if there are none.
        logits: the output ``[B, T, vocabulary]``.
        fed: further inputs.
        vocabulary: token ids that the embedding table knows; None if the graph holds none.
        hidden: whether ``logits`` are hidden states, of a graph without an output projection.
        static: whether caches have the same size before and after a call, so that a caller must
            give them with room for the new tokens.
        padding: whether the mask may hide tokens on the left; not where the number of tokens that
            it keeps is taken for their place in the caches.
        right_padding: whether sequences of a batch may be padded on the right, and grow from
            lengths of their own: all layers take the number of tokens that the mask keeps for that
            place, and no state goes through the padding.
        states: what recurrent layers hand from call to call beside the caches, zeros at first.
        call_tokens: most tokens of a call, of which the graph computes one chunk of a recurrence;
            None for any number.
    """

    tokens: str
    attention_mask: str | None
    position_ids: str | None
    logits: str
    fed: tuple[ExtraInput, ...] = ()
    vocabulary: int | None = None
    hidden: bool = False
    static: bool = False
    padding: bool = True
    right_padding: bool = False
    states: tuple[CachePair, ...] = ()
    call_tokens: int | None = None


@dataclass(frozen=True)
class LayerPlan:
    """One attention layer: what it was, and what it becomes.

    Attributes:
        layer: index, counted in graph order from 0.
        dialect: the form it was recognised in.
        num_heads: query heads H.
        kv_num_heads: key/value heads N.
        head_size: D.
        dtype: ONNX element type of query, key and value: ``FLOAT``, ``FLOAT16`` or ``BFLOAT16``.
        scale: factor on the scores.
        causal: whether the operator masks the future itself (otherwise the bias does).
        sliding_window: number of visible keys, the query's own included; 0 for all.
        softcap: 0 for none.
        has_bias: whether an additive mask goes into the operator.
        key: the cache of keys.
        value: the cache of values.
        rotation_seed: seed of this layer's rotation.
        has_sink: whether sinks of the heads go into the operator, which then has a bias too.
        has_padding: whether the number of slots that are padding goes into the operator.
        centered: whether offsets are taken from keys and values before they are encoded, and given
            back when they are read.
        equalised: whether queries are multiplied and keys divided by scales that make their
            channels alike.
        adaptation: digest of those scales and of the offsets; empty without either. Graphs whose
            digests differ cannot go on with each other's caches.
        readers: attentions that read the caches; more than one where layers share them.
    """

    layer: int
    dialect: str
    num_heads: int
    kv_num_heads: int
    head_size: int
    dtype: str
    scale: float
    causal: bool
    sliding_window: int
    softcap: float
    has_bias: bool
    key: CachePlan
    value: CachePlan
    rotation_seed: int
    has_sink: bool = False
    has_padding: bool = False
    centered: bool = False
    equalised: bool = False
    adaptation: str = ""
    readers: int = 1

    @property
    def caches(self) -> tuple[CachePlan, CachePlan]:
        """Both caches, keys first."""
        return self.key, self.value

    def with_caches(self, **facts: Any) -> LayerPlan:
        """Return the layer with other facts of both caches."""
        key, value = (replace(cache, **facts) for cache in self.caches)
        return replace(self, key=key, value=value)

    def cache(self, role: Role) -> CachePlan:
        """Return the cache of keys or of values."""
        return self.key if role == "key" else self.value

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        """Codecs of keys and values."""
        return self.key.codec, self.value.codec


def planes_of(layers: Iterable[LayerPlan]) -> list[tuple[int, int]]:
    """Return head size and bytes of a row of each cache that exact tokens have entries in."""
    return [
        (layer.head_size, cache.row_bytes)
        for layer in layers
        for cache in layer.caches
        if not any(codec.is_raw for codec in layer.codecs)
    ]


@dataclass(frozen=True)
class Plan:
    """A whole conversion.

    Attributes:
        tool_version: version of tq-onnx that made it.
        layout_digest: row layout that it was made for: that of its codecs (see ``codec.spec``).
        preset: preset name.
        rotation: ``qr`` or ``hadamard``; ``none`` where nothing is rotated.
        seed: base seed of the rotations.
        norm_correction: what scales make up for, where a codec can: 0 nothing, 1 the norm that
            quantisation loses, 2 the product with the vector.
        fixed_capacity: whether a caller may bind caches of fixed capacity, updated in place; if
            not, caches must grow, because the graph takes positions from their length.
        interface: names of the other inputs and outputs.
        layers: one entry per attention layer, in graph order.
        recent: how many of the newest tokens caches hold in float16, too.
        sinks: how many of the first tokens, likewise.
        overlay_rows: rows in front of those of the tokens in every cache; 0 without a window.
        target: what the model was made for, a name in ``tq_onnx.targets.registry``. All models run
            on the CPU too.
        gains: how many gains encoders try, where a codec can; 0 for none.
        block_size: tokens in a page, where caches lie in pages and a call takes packed requests;
            0 for caches of sequences.
        planes: whether codes and fields of all caches lie apart (``codec.planes``).
    """

    tool_version: str
    layout_digest: str
    preset: str
    rotation: str
    seed: int
    norm_correction: int
    fixed_capacity: bool
    interface: Interface
    layers: tuple[LayerPlan, ...]
    target: str = CPU
    recent: int = 0
    sinks: int = 0
    overlay_rows: int = 0
    gains: int = 0
    block_size: int = 0
    planes: bool = False

    @property
    def has_window(self) -> bool:
        """True if caches hold exact tokens."""
        return self.recent + self.sinks > 0

    @property
    def layout_facts(self) -> dict[str, bool]:
        """What the layout digest depends on besides codecs, see ``codec.spec.layout_digest``."""
        return {"has_window": self.has_window, "has_planes": self.planes}

    def window_of(self, layer: LayerPlan) -> Window:
        """Return the window of a layer's caches; raw ones have its rows and no entries."""
        if any(codec.is_raw for codec in layer.codecs):
            return Window(0, 0, self.overlay_rows)
        fields = field_bytes(layer.key.codec, layer.head_size) if self.planes else 0
        return Window(self.recent, self.sinks, self.overlay_rows, fields)

    @property
    def page_window(self) -> PageWindow | None:
        """Where exact tokens lie in pages; None without them.

        Raises:
            ValueError: full pages have no room for the first tokens.
        """
        coded = [layer for layer in self.layers if self.window_of(layer).entries]
        if not self.block_size or not coded:
            return None
        rows = [
            row_layout(cache.codec, layer.head_size).row_bytes
            for layer in coded
            for cache in layer.caches
        ]
        return PageWindow(
            self.recent,
            self.sinks,
            coded[0].head_size,
            self.block_size,
            max(rows),
            coded[0].key.row_bytes,
        )

    @property
    def spare_rows(self) -> int:
        """Rows behind the tokens that all exact tokens take; 0 if theirs are elsewhere."""
        has_rows = self.overlay_rows or self.block_size
        entries = 0 if has_rows else self.recent + self.sinks
        return rows_of_entries(entries, planes_of(self.layers))

    @property
    def window_bytes(self) -> int:
        """Cache bytes of one sequence that its exact tokens take, all layers."""
        return (self.overlay_rows + self.spare_rows) * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes that one more token of one sequence costs, all layers, metadata included."""
        return sum(
            layer.kv_num_heads * cache.row_bytes for layer in self.layers for cache in layer.caches
        )

    @property
    def caches(self) -> tuple[CachePlan, ...]:
        """The caches of all layers, in their order, keys first."""
        return tuple(cache for layer in self.layers for cache in layer.caches)

    @property
    def pairs(self) -> tuple[tuple[Codec, Codec], ...]:
        """The distinct codecs of keys and values, in the order of the layers."""
        return tuple(dict.fromkeys(layer.codecs for layer in self.layers))

    @property
    def codecs(self) -> frozenset[Codec]:
        """The codecs of all caches."""
        return frozenset(cache.codec for cache in self.caches)

    def correction_of(self, codec: Codec) -> int:
        """Return what scales of a codec make up for."""
        return int(self.norm_correction) if codec.corrects_norm else NOT_CORRECTED

    @property
    def centered(self) -> bool:
        """True if some layer has offsets."""
        return any(layer.centered for layer in self.layers)

    @property
    def rotary(self) -> bool:
        """True if the offset of some cache turns with its slots."""
        return any(cache.rotary for cache in self.caches)

    @property
    def feeds_back(self) -> bool:
        """True if some cache has error feedback."""
        return any(cache.feedback for cache in self.caches)

    def unlike(self, continuation: Plan) -> int | None:
        """Return the first layer whose caches another graph cannot continue; None if it can."""
        pairs = zip_longest(_rows_of(self), _rows_of(continuation))
        return next(
            (index for index, (row, continued_row) in enumerate(pairs) if row != continued_row),
            None,
        )

    def to_json(self) -> str:
        """Return one JSON document with stable key order."""
        return json.dumps({"version": PLAN_VERSION, **asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what ``to_json`` wrote.

        Raises:
            ModelFileError: the text is not a plan, or one of another version.
        """
        try:
            entries = json.loads(text)
            version = entries.pop("version", 1)
            if version in range(1, PLAN_VERSION):
                raise ModelFileError(
                    "the model was converted by an earlier version of tq-onnx",
                    where=METADATA_PLAN,
                    fix="convert the original model again",
                )
            if version != PLAN_VERSION:
                raise ModelFileError(
                    f"the plan is of version {str(version)[:_MESSAGE]}, and this tq-onnx "
                    f"reads version {PLAN_VERSION}",
                    where=METADATA_PLAN,
                    fix="use a newer version of tq-onnx",
                )
            plan: Plan = _record(cls, entries)
            _check_sizes(plan)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelFileError(
                "the model's conversion metadata cannot be read",
                where=METADATA_PLAN,
                fix=f"convert the original model again ({error})",
            ) from error
        return plan


def plan_in(metadata: Mapping[str, str]) -> Plan | None:
    """Return the plan in a model's metadata; None if the model was not converted.

    Raises:
        ModelFileError: the plan cannot be read.
        UnsupportedModelError: the model's layout digest is not that of its plan.
    """
    text = metadata.get(METADATA_PLAN)
    if text is None:
        return None
    plan = Plan.from_json(text)
    digest = metadata.get(METADATA_DIGEST, plan.layout_digest)
    if digest != plan.layout_digest:
        raise UnsupportedModelError(
            f"the model's {METADATA_DIGEST} is {digest[:40]!r}, and its plan is for the row layout "
            f"{plan.layout_digest!r}",
            fix="convert the original model again",
        )
    return plan


def _rows_of(plan: Plan) -> Iterator[tuple[object, ...]]:
    """Yield the facts that give meaning to the bytes of each layer's caches."""
    for layer in plan.layers:
        yield (
            *(plan.recent, plan.sinks, plan.overlay_rows, plan.planes),
            *(layer.kv_num_heads, layer.head_size, layer.adaptation),
            *((cache.codec, cache.row_bytes) for cache in layer.caches),
            (plan.rotation, layer.rotation_seed)
            if any(codec.is_rotated for codec in layer.codecs)
            else None,
        )


def _check_sizes(plan: Plan) -> None:
    """Raise ValueError for numbers that no plan has."""
    if min(plan.recent, plan.sinks, plan.overlay_rows, plan.block_size) < 0:
        raise ValueError("a window or a page has a size below 0")
    if plan.norm_correction not in NORM_CORRECTIONS or not 0 <= plan.gains <= MAX_GAINS:
        raise ValueError(f"no encoder tries {plan.gains} gains, or corrects so")
    for codec in plan.codecs if plan.planes else ():
        field_bytes(codec, plan.layers[0].head_size)
    for layer in plan.layers:
        sizes = [layer.num_heads, layer.kv_num_heads, layer.head_size, layer.readers]
        sizes += [size for cache in layer.caches for size in (cache.row_bytes, cache.size)]
        if min(sizes) < 1 or layer.layer < 0:
            raise ValueError(f"layer {layer.layer} has a size below 1")
        if layer.key.size != layer.head_size or layer.value.size > layer.head_size:
            raise ValueError(f"layer {layer.layer} has values of {layer.value.size} numbers")
        if layer.dtype not in ELEMENTS:
            raise ValueError(f"layer {layer.layer} has the dtype {layer.dtype!r}")
    if plan.page_window is not None and plan.recent + plan.sinks > MAX_ENTRIES:
        raise ValueError(f"pages have {plan.recent + plan.sinks} exact tokens")


def _record(record: Any, entries: Mapping[str, Any]) -> Any:
    """Return a record of JSON entries, all of the types that it declares.

    Raises:
        TypeError, KeyError, AttributeError: they are not, one is missing, or it has no such field.
    """
    hints = _hints(record)
    return record(**{name: _field(name, hints[name], each) for name, each in entries.items()})


_hints = cache(get_type_hints)


def _field(name: str, hint: Any, value: Any) -> Any:
    """Return the value of a field of that type; JSON writes some floats as integers."""
    if is_dataclass(hint):
        return _record(hint, value)
    if get_origin(hint) is tuple:
        return tuple(_field(name, get_args(hint)[0], each) for each in value)
    kinds = get_args(hint) or (hint,)
    number = value if isinstance(value, int | float) else 0
    allowed = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, allowed) or not isfinite(number) or abs(number) >= _MOST:
        raise TypeError(f"{name} is {value!r}"[:_MESSAGE])
    return value
