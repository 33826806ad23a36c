"""The bodies of both operators, made for the codecs and the optional inputs of one model.

A body declares the inputs up to the last one that the model uses; runtimes want a node to have as
many. Those in the middle that the model lacks are empty on its nodes, and the body does not touch
them. Attributes that say the codec (``codec``, ``key_bits`` ...) belong to the signature, which the
kernels share. Where the caches of a model have more than one codec, the attributes ``codec_index``,
``key_codec_index`` and ``value_codec_index`` choose between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from tq_onnx.codec.planes import field_bytes
from tq_onnx.codec.spec import MAX_HEAD_SIZE, Codec
from tq_onnx.ops.bodies import F32, attention, elements, encode, offsets, planeforms, window
from tq_onnx.ops.bodies import tables as sizing
from tq_onnx.ops.bodies.codecs import reader, writer
from tq_onnx.ops.bodies.composing import Composer
from tq_onnx.ops.features import (
    ATTENTION_BIAS,
    EXACT_WINDOW,
    FEEDBACK,
    GAINS,
    HEAD_SINK,
    LEFT_PADDING,
    MIXED_CODECS,
    OFFSETS,
    PLANES,
    ROTARY_OFFSETS,
    SPARE_ROWS,
    Features,
)
from tq_onnx.ops.operator import Attribute, Operator
from tq_onnx.ops.operators import Attention, Encode

Pairs = Sequence[tuple[Codec, Codec]]

Encoder = tuple[Codec, bool]
"""A codec, and whether errors are fed back."""


@dataclass(frozen=True)
class Model:
    """The facts of a model that the bodies need."""

    #: all codecs of its caches, in the order of the attributes that choose
    codecs: tuple[Codec, ...]
    pairs: tuple[tuple[Codec, Codec], ...]  #: those of keys and of values, as they come together
    features: Features  #: what else the model has
    element: str  #: element type of vectors and queries

    @property
    def field_bytes(self) -> int:
        """Bytes of the fields of every row, which lie apart from the codes; 0 if they do not."""
        # They are the same for all head sizes.
        return field_bytes(self.codecs[0], MAX_HEAD_SIZE) if PLANES in self.features else 0

    @property
    def encoders(self) -> tuple[Encoder, ...]:
        """All encoders, in the order of the attribute that chooses."""
        return body_encoders(self.pairs, FEEDBACK in self.features)

    @property
    def encode_features(self) -> Features:
        """Those of TurboQuantEncode."""
        return self._with_choice(len(self.encoders))

    @property
    def attention_features(self) -> Features:
        """Those of TurboQuantDequantAttention."""
        return self._with_choice(len(self.codecs))

    def _with_choice(self, cases: int) -> Features:
        return self.features | {MIXED_CODECS} if cases > 1 else self.features - {MIXED_CODECS}

    def number(self, codec: Codec) -> int:
        """Return the name of a codec in the attributes that choose."""
        return self.codecs.index(codec)


def body_codecs(pairs: Pairs) -> tuple[Codec, ...]:
    """Return the codecs of a model in the order that ``codec_index`` counts in."""
    return tuple(dict.fromkeys(codec for pair in pairs for codec in pair))


def body_encoders(pairs: Pairs, has_feedback: bool) -> tuple[Encoder, ...]:
    """Return the encoders of a model in the order that ``codec_index`` of the encoder counts in."""
    fed = [((key, has_feedback and key.searches), (value, False)) for key, value in pairs]
    return tuple(dict.fromkeys(encoder for pair in fed for encoder in pair))


def _rotation(
    body: Composer, table: ir.Value, head_size: ir.Value, codec: Codec, others: Sequence[Codec]
) -> ir.Value:
    """Return a rotation of the codec's size, if nodes with other codecs bring another one."""
    sizes = {each.is_rotated and each.coordinates(1) for each in others}
    if len(sizes) == 1:
        return table
    per_coordinate = {"per_coordinate": codec.coordinates(1)}
    inputs = [table, head_size]
    return body.call(f"sized_{table.name}", sizing.rotation_of_codec, inputs, per_coordinate)


def encode_function(model: Model) -> ir.Function:
    """Return the body of TurboQuantEncode."""
    features = model.encode_features
    given = inputs_of(Encode, features)
    body = Composer()
    vectors = given["vectors"]
    if OFFSETS in model.features:
        slots = body.call("slots", offsets.slots_of_new, [vectors, given["past_length"]])
        vectors = centred(body, model, given, slots)
    cases = {
        number: partial(encoded_rows, model=model, encoder=encoder, given=given, vectors=vectors)
        for number, encoder in enumerate(model.encoders)
    }
    rows = body.choose("rows", Encode.codec_index, cases, given["past_length"])
    past, lengths = given["past"], given["past_length"]
    if PLANES in model.features:
        past = in_rows(body, model, past, "past", Encode.overlay_rows)
    if EXACT_WINDOW not in model.features:
        present = body.call("present", encode.append_rows, [past, rows, lengths])
        present = in_planes(body, model, present)
        return body.function(Encode, features, [*given.values()], present)
    sizes = (Encode.recent, Encode.sinks)
    if SPARE_ROWS in model.features:
        present = body.call("tokens", encode.append_rows, [past, rows, lengths])
        ends = body.call("ends", window.ends_of, [given["vectors"], lengths])
        head_size = body.standard("head_size", "Shape", [given["vectors"]], start=3)
        inputs = [past, head_size, ends]
        before = body.call("spare", window.spare_entries_of, inputs, forwarded=sizes)
        before = body.call("overlay", window.overlay_of_spare, [past, present, before])
        inputs = [before, given["vectors"], lengths]
        entries = body.call("entries", window.written_entries, inputs, forwarded=sizes)
        inputs = [present, entries, ends]
        present = body.call("present", window.with_spare_entries, inputs, forwarded=sizes)
        return body.function(Encode, features, [*given.values()], present)
    behind = body.call("behind", window.rows_behind, [past], forwarded=(Encode.overlay_rows,))
    tokens = body.call("tokens", encode.append_rows, [behind, rows, lengths])
    inputs = [past, given["vectors"], lengths]
    entries = body.call("entries", window.written_entries, inputs, forwarded=sizes)
    forwarded = (*sizes, Encode.overlay_rows)
    overlay = body.call("overlay", window.overlay_of, [past, entries], forwarded=forwarded)
    present = body.standard("present", "Concat", [overlay, tokens], axis=2)
    present = in_planes(body, model, present)
    return body.function(Encode, features, [*given.values()], present)


def in_rows(
    body: Composer, model: Model, cache: ir.Value, name: str, overlay_rows: Attribute
) -> ir.Value:
    """Return a cache with planes as rows, the overlay first."""
    attributes, forwarded = _plane_sizes(model, overlay_rows)
    piece = planeforms.rows_of_planes
    return body.call(f"{name}_rows", piece, [cache], attributes, forwarded)


def in_planes(body: Composer, model: Model, rows: ir.Value) -> ir.Value:
    """Return a cache as the model has it: with planes, or of rows as they are."""
    if PLANES not in model.features:
        return rows
    attributes, forwarded = _plane_sizes(model, Encode.overlay_rows)
    rows.name, name = f"{rows.name}_rows", rows.name or ""
    return body.call(name, planeforms.planes_of_rows, [rows], attributes, forwarded)


def _plane_sizes(
    model: Model, overlay_rows: Attribute
) -> tuple[dict[str, int], tuple[Attribute, ...]]:
    """Return the attributes of pieces for planes: those of the model, and those of the node."""
    fields = {"field_bytes": model.field_bytes}
    if EXACT_WINDOW in model.features:
        return fields, (overlay_rows,)
    return {**fields, overlay_rows.name: 0}, ()


def centred(
    body: Composer, model: Model, given: Mapping[str, ir.Value], slots: ir.Value
) -> ir.Value:
    """Return the vectors of an encoder in float32, less the offsets of their slots [B or 1, T]."""
    taken = (
        turned_offset(body, model, given, slots, "")
        if ROTARY_OFFSETS in model.features
        else body.call("offsets", offsets.offset_of_slots, [given["offset"], slots])
    )
    return body.call("centred", offsets.without, [given["vectors"], taken])


def turned_offset(
    body: Composer, model: Model, given: Mapping[str, ir.Value], slots: ir.Value, prefix: str
) -> ir.Value:
    """Return offsets [B or 1, N, T, D] that turn with slots [B or 1, T]."""
    # Attention that lacks it has it all the same, as an empty input in the middle.
    padding = (
        given["left_padding"]
        if LEFT_PADDING in model.features
        else body.standard("no_padding", "Constant", [], value_int=0)
    )
    inputs = [given[f"{prefix}offset"], slots, given[f"{prefix}frequencies"], padding]
    return body.call("turned_offset", offsets.turned_offset, inputs)


def encoded_rows(
    body: Composer,
    *,
    model: Model,
    encoder: Encoder,
    given: Mapping[str, ir.Value],
    vectors: ir.Value,
) -> ir.Value:
    """Return the rows of vectors, as one of the model's encoders makes them.

    Args:
        vectors: what to encode; in float32 where the model has offsets.
    """
    codec, feeds = encoder
    how = writer(codec, model.element)
    piece, names = how.rows, how.tables
    if GAINS in model.features and how.searched is not None:
        piece, names = how.searched, (*names, "gains")
    if feeds and how.fed is not None:
        piece, names = how.fed, (*names, "feedback")
    if OFFSETS not in model.features:
        vectors = body.standard("wide", "Cast", [vectors], to=F32)
    tables = {name: given[name] for name in names}
    if "rotation" in tables and len(model.encoders) > 1:
        head_size = body.standard("head_size", "Shape", [vectors], start=3)
        if "feedback" in tables:
            inputs = [tables["feedback"], vectors, head_size]
            tables["feedback"] = body.call("matrices", sizing.matrices_of_heads, inputs)
        tables["rotation"] = _rotation(body, tables["rotation"], head_size, codec, model.codecs)
    forwarded = (Encode.norm_correction,) if how.corrects_norm else ()
    return body.call("rows", piece, [vectors, *tables.values()], how.attributes, forwarded)


def attention_function(model: Model) -> ir.Function:
    """Return the body of TurboQuantDequantAttention."""
    features = model.attention_features
    given = inputs_of(Attention, features)
    body = Composer()
    names = [*given.values()]
    if PLANES in model.features:
        for name in ("key_cache", "value_cache"):
            given[name] = in_rows(body, model, given[name], name, Attention.overlay_rows)
    total = body.call("total", attention.total_length, [given["query"], given["past_length"]])
    sums = AttentionBody(model, body, given, total).output()
    output = body.standard("output", "CastLike", [sums, given["query"]])
    return body.function(Attention, features, names, output)


def inputs_of(operator: type[Operator], features: Features) -> dict[str, ir.Value]:
    """Return the inputs of an operator's function by name."""
    return {each.name: ir.Value(name=each.name) for each in operator.inputs_with(features)}


class AttentionBody:
    """The body of an attention operator while it is made."""

    def __init__(
        self,
        model: Model,
        body: Composer,
        given: Mapping[str, ir.Value],
        total: ir.Value,
    ) -> None:
        self.model = model
        self.body = body
        self.given = given
        self.total = total
        self.head_size = body.standard("head_size", "Shape", [given["query"]], start=3)
        self.exact: Exact | None = None
        if EXACT_WINDOW in model.features:
            spare = SPARE_ROWS in model.features
            self.exact = Exact(body, given, self.head_size, total, takes_spare_rows=spare)

    def output(self) -> ir.Value:
        """Return what attention makes, float32 [B, H, T, D]."""
        weights, visible = self.weights()
        return self.sums(weights, visible)

    def weights(self) -> tuple[ir.Value, ir.Value]:
        """Return the weights of the values [B, H, T, S], and which keys are visible."""
        body, given, model = self.body, self.given, self.model
        visible = body.call(
            "visible",
            attention.visible_keys,
            [given["query"], given["past_length"], self.total],
            forwarded=(Attention.causal, Attention.sliding_window),
        )
        if LEFT_PADDING in model.features:
            inputs = [given["left_padding"], self.total]
            behind = body.call("behind_padding", attention.behind_padding, inputs)
            visible = body.standard("visible_behind", "And", [visible, behind])
        scores = self._scores()
        if ATTENTION_BIAS in model.features:
            bias = body.call("bias", attention.live_bias, [given["attention_bias"], self.total])
            hidden = body.call("hidden", attention.hidden_by_bias, [bias])
            shown = body.standard("shown", "Not", [hidden])
            visible = body.standard("visible_shown", "And", [visible, shown])
            wide_bias = body.standard("wide_bias", "Cast", [bias], to=F32)
            scores = body.standard("biased", "Add", [scores, wide_bias])
        if HEAD_SINK not in model.features:
            return body.call("weights", attention.masked_softmax, [scores, visible]), visible
        sink = body.standard("sink", "Cast", [given["head_sink"]], to=F32)
        inputs = [scores, visible, sink]
        return body.call("weights", attention.masked_softmax_with_sink, inputs), visible

    def _scores(self) -> ir.Value:
        body, model = self.body, self.model
        keys = dict.fromkeys(key for key, _ in model.pairs)
        cases = {model.number(key): partial(self._scores_of_cache, codec=key) for key in keys}
        scores = body.choose("scores", Attention.key_codec_index, cases, self.given["past_length"])
        if OFFSETS in model.features:
            query = body.standard("wide_query", "Cast", [self.given["query"]], to=F32)
            scale = (Attention.scale,)
            if ROTARY_OFFSETS in model.features:
                slots = body.call("slots", offsets.all_slots, [self.total])
                turned = turned_offset(body, model, self.given, slots, "key_")
                more = body.call("more", offsets.turned_scores, [query, turned], forwarded=scale)
            else:
                inputs = [query, self.given["key_offset"], self.total]
                more = body.call("more", offsets.offset_scores, inputs, forwarded=scale)
            scores = body.standard("all_scores", "Add", [scores, more])
        if self.exact is not None:
            scores = self.exact.scores(scores)
        return body.call("capped", attention.softcapped, [scores], forwarded=(Attention.softcap,))

    def _scores_of_cache(self, body: Composer, *, codec: Codec) -> ir.Value:
        query = body.standard("wide", "Cast", [self.given["query"]], to=F32)
        if codec.is_rotated:
            rotation = self._rotation(body, "key", codec)
            query = body.call("turned", attention.rotated, [query, rotation])
        keys, scales = self._read(body, "key", codec)
        inputs = [query, keys, scales]
        return body.call("plain_scores", attention.key_scores, inputs, forwarded=(Attention.scale,))

    def sums(self, weights: ir.Value, visible: ir.Value) -> ir.Value:
        """Return weighted sums of the values, float32 [B, H, T, D]."""
        body, model = self.body, self.model
        if self.exact is not None:
            exact = self.exact.sums(weights)
            weights = self.exact.weights_of_rows(weights)
        values = dict.fromkeys(value for _, value in model.pairs)
        cases = {
            model.number(value): partial(
                self._sums_of_cache, codec=value, weights=weights, visible=visible
            )
            for value in values
        }
        sums = body.choose("sums", Attention.value_codec_index, cases, self.given["past_length"])
        if OFFSETS in model.features:
            inputs = [self.given["query"], weights, self.given["value_offset"], self.total]
            more = body.call("more_sums", offsets.offset_sums, inputs)
            sums = body.standard("all_sums", "Add", [sums, more])
        if self.exact is not None:
            sums = body.standard("sums_of_both", "Add", [sums, exact])
        return sums

    def _sums_of_cache(
        self, body: Composer, *, codec: Codec, weights: ir.Value, visible: ir.Value
    ) -> ir.Value:
        values, scales = self._read(body, "value", codec)
        scaled = body.call("scaled", attention.value_weights, [weights, visible, scales])
        add = elements.sum_of_floats if codec.is_raw else attention.sum_of_finite
        grouped = body.call("grouped", add, [scaled, values])
        sums = body.call("context", attention.of_all_heads, [grouped, self.given["query"]])
        if not codec.is_rotated:
            return sums
        rotation = self._rotation(body, "value", codec)
        return body.call("turned_back", attention.rotated_back, [sums, rotation])

    def _read(self, body: Composer, side: str, codec: Codec) -> tuple[ir.Value, ir.Value]:
        """Return coordinates [B, N, S, C] of the live rows of a cache, and scales [B, N, S]."""
        how = reader(codec, self.model.element)
        cache = self.given[f"{side}_cache"]
        if self.exact is not None:
            forwarded = (Attention.overlay_rows,)
            cache = body.call(f"{side}_behind", window.rows_behind, [cache], forwarded=forwarded)
        rows = body.call(f"{side}_rows", attention.live_rows, [cache, self.total])
        tables = [self.given[f"{side}_centroids"]] if codec.is_rotated else []
        inputs = [rows, self.head_size, *tables]
        coordinates = body.call(f"{side}_coordinates", how.coordinates, inputs)
        if how.scales is None:
            return coordinates, body.call(f"{side}_scales", elements.no_scales, [rows])
        inputs = [rows, self.head_size]
        return coordinates, body.call(f"{side}_scales", how.scales, inputs, how.attributes)

    def _rotation(self, body: Composer, side: str, codec: Codec) -> ir.Value:
        others = [pair[side == "value"] for pair in self.model.pairs]
        return _rotation(body, self.given[f"{side}_rotation"], self.head_size, codec, others)


class Exact:
    """What queries take from entries, or from the call, while the body is made.

    Args:
        takes_spare_rows: whether the window is behind the rows of the tokens, not in front of them.
    """

    def __init__(
        self,
        body: Composer,
        given: Mapping[str, ir.Value],
        head_size: ir.Value,
        total: ir.Value,
        *,
        takes_spare_rows: bool,
    ) -> None:
        self.body = body
        self.given = given
        self.head_size = head_size
        self._takes_spare_rows = takes_spare_rows
        self._window = (Attention.recent, Attention.sinks)
        self.entries = {
            side: self._entries_of(given[f"{side}_cache"], side) for side in ("key", "value")
        }
        name = "entries_of_tokens"
        self.of_tokens = body.call(name, window.entries_of_tokens, [total], forwarded=self._window)
        key, value = (self._tagged(side) for side in ("key", "value"))
        self.has_entry = body.standard("has_entry", "And", [key, value])
        inputs = [given["query"], given["past_length"], self.has_entry]
        self.taken = body.call("taken", window.taken_exactly, inputs, forwarded=self._window)

    def scores(self, scores: ir.Value) -> ir.Value:
        """Return the scores, of exact keys where queries take them."""
        inputs = [self.given["query"], self._vectors("key")]
        forwarded = (Attention.scale,)
        exact = self.body.call("exact_scores", window.exact_scores, inputs, forwarded=forwarded)
        return self.body.standard("scores_of_both", "Where", [self.taken, exact, scores])

    def weights_of_rows(self, weights: ir.Value) -> ir.Value:
        """Return the weights, zero where queries take exact vectors."""
        return self.body.call("row_weights", window.row_weights, [weights, self.taken])

    def sums(self, weights: ir.Value) -> ir.Value:
        """Return the weighted sums of exact values."""
        inputs = [weights, self.taken, self._vectors("value"), self.given["query"]]
        return self.body.call("exact_sums", window.exact_sums, inputs)

    def _tagged(self, side: str) -> ir.Value:
        """Return whether each token has an entry of its own in a cache."""
        inputs = [self.entries[side], self.head_size, self.of_tokens]
        return self.body.call(f"{side}_tagged", window.tokens_with_tags, inputs)

    def _vectors(self, side: str) -> ir.Value:
        given = self.given
        inputs = [self.entries[side], self.of_tokens, self.has_entry]
        inputs += [given[f"new_{side}s"], given["past_length"]]
        return self.body.call(f"exact_{side}s", window.exact_vectors, inputs)

    def _entries_of(self, cache: ir.Value, side: str) -> ir.Value:
        inputs = [cache, self.head_size]
        name, forwarded = f"{side}_entries", self._window
        if not self._takes_spare_rows:
            return self.body.call(name, window.entries_of, inputs, forwarded=forwarded)
        lengths = [self.given["query"], self.given["past_length"]]
        inputs.append(self.body.call(f"{side}_ends", window.ends_of, lengths))
        return self.body.call(name, window.spare_entries_of, inputs, forwarded=forwarded)
