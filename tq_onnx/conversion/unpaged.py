"""Read a decoder that was exported with pages as the same decoder without them.

onnxruntime-genai's builder writes ``com.microsoft.PagedAttention`` for CUDA and WebGPU
(``use_paged_attention=true``). The operator takes the tokens of many requests, one behind the other
and without padding, and caches in pages of ``[pages, slots, N, D]``:

======  ============================  ============================================================
0       query                         ``[n, H * D]``; or Q, K and V side by side if 1, 2 are empty
1, 2    key, value                    ``[n, N * D]``
3, 4    key_cache, value_cache        graph inputs, returned at outputs 1 and 2
5       cumulative_sequence_length    where requests begin and end, ``[R + 1]``
6       past_seqlens                  tokens of each request in its pages, ``[R]``
7       block_table                   pages of each request, ``[R, C]``
8, 9    cos_cache, sin_cache          as in GroupQueryAttention; positions count on from the past
10      slot_mapping                  refused
11      head_sink                     as in GroupQueryAttention
12, 13  q_norm_weight, k_norm_weight  RMS norm of every head before the rotation
14, 15  k_scale, v_scale              refused: the cache is quantised already
16      attention_metadata            bounds of lengths, which choose kernels and change no result
======  ============================  ============================================================

B requests with T new tokens each are one call of such a graph: its n = B * T tokens, in this order.
What pages hold of a request, in the order of its table, is a cache ``[B, N, P, D]``. So each node
becomes a GroupQueryAttention over such caches, which has the same attributes with the same meaning
(``local_window_size`` counts the token itself), and ids and logits get the axes of a batch. Nothing
else in the graph changes. From there it is recognised, converted and compared like any other, also
to pages again, where nothing but attention may mix tokens (``tq_onnx.targets.paged``).

A windowed table (``block_table_windowed``) gives the pages of old tokens to new ones. A sliding
window does not see them, so the layer is the same with all of its pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import onnx_ir as ir

from tq_onnx.errors import ModelFileError, UnsupportedModelError
from tq_onnx.files import load as files
from tq_onnx.files.load import LoadedModel
from tq_onnx.graph.builder import Builder, Dim
from tq_onnx.graph.constants import attribute_float, attribute_int
from tq_onnx.graph.liveness import data_ancestors
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import FLOATS, label, rank, static_dim
from tq_onnx.ops.domain import MICROSOFT

UNPAGED: Final = "unpaged"
"""What ``LoadedModel.branch`` says of such a model: onnxruntime opens it from memory."""
_PAGED: Final = f"{MICROSOFT}.PagedAttention"
_FIX: Final = 'export it without use_paged_attention; `target="paged"` makes pages'
_SCOPE: Final = "unpaged"

QUERY, KEY, VALUE, KEY_CACHE, VALUE_CACHE, BOUNDS, PAST, TABLE, COS, SIN = range(10)
SLOT_MAPPING, SINK, Q_NORM, K_NORM, K_SCALE, V_SCALE, METADATA, SLOTS = range(10, 18)
_LENGTHS: Final = (BOUNDS, PAST, TABLE, METADATA)
"""Inputs that say where tokens belong."""
_REFUSED_INPUTS: Final = {
    SLOT_MAPPING: "the operator takes slots of its own (slot_mapping)",
    K_SCALE: "the key cache is quantised already (k_scale)",
    V_SCALE: "the value cache is quantised already (v_scale)",
}
_ATTRIBUTES: Final = (
    *("num_heads", "kv_num_heads", "scale", "softcap"),
    *("local_window_size", "do_rotary", "rotary_interleaved"),
)
_DEFAULTS: Final[Mapping[str, int | str]] = {
    "is_causal": 1,
    "rotary_offset": 0,
    "v_head_size": 0,
    "kv_cache_layout": "SEPARATE",
    "k_quant_type": "NONE",
    "v_quant_type": "NONE",
    "k_cache_dtype": "",
    "v_cache_dtype": "",
}
"""Attributes of which only the default is known to be what GroupQueryAttention does."""
_EPSILON: Final = "qk_norm_epsilon"
_LATENT: Final = (
    "the cache holds latent vectors, which are keys and values at once (kv_cache_layout LATENT, "
    "multi-head latent attention, MLA)"
)
_INTEGERS: Final = (ir.DataType.INT64, ir.DataType.INT32)
_INT64: Final = ir.DataType.INT64
_INT32: Final = ir.DataType.INT32
_BATCH: Final[tuple[Dim, Dim]] = ("batch_size", "sequence_length")
_MASK_DIMS: Final[tuple[Dim, Dim]] = ("batch_size", "total_sequence_length")


def load(path: Path) -> LoadedModel:
    """Load a model, see ``tq_onnx.files.load``; one with pages as the same decoder without them.

    Raises:
        TqOnnxError: the file is refused, or not all of its pages are understood.
    """
    loaded = files.load(path)
    graph = loaded.model.graph
    if not any(kind(node) == _PAGED for node in graph):
        return loaded
    try:
        _Decoder(graph).unpage()
    except NoMatch as miss:
        node = "" if miss.node is None else f" (node {label(miss.node)})"
        what = f"the model was exported with pages (PagedAttention), and {miss.reason}{node}"
        raise UnsupportedModelError(what, where=str(loaded.path), fix=_FIX) from miss
    except Exception as error:  # onnx-ir has no closed set of errors for damaged graphs
        what = f"the graph cannot be read ({type(error).__name__})"
        raise ModelFileError(what, where=str(loaded.path), fix="export it again") from error
    return replace(loaded, branch=UNPAGED)


class _Decoder:
    """A graph for packed tokens, and what its inputs and outputs are."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._nodes = [node for node in graph if kind(node) == _PAGED]
        for node in self._nodes:
            _expect_known(node)
        self._build = Builder(graph)
        self._first = next(iter(graph))
        self._lengths = self._find_lengths()
        caches = {node.inputs[slot] for node in self._nodes for slot in (KEY_CACHE, VALUE_CACHE)}
        named = {*caches, *self._lengths}
        self._ids, self._chosen = _tokens([value for value in graph.inputs if value not in named])
        returned = {output for node in self._nodes for output in node.outputs[1:]}
        self._logits = _logits(graph, returned)

    def unpage(self) -> None:
        """Rewrite the graph in place."""
        build, graph = self._build, self._graph
        with build.before(self._first, _SCOPE):
            self._ids.shape = ir.Shape(_BATCH)
            self._sizes = build.op("Shape", [self._ids], "sizes", dtype=_INT64, shape=[2])
            mask = self._mask()
            lengths = self._counts(mask)
        for value in self._chosen:
            for use in list(value.uses()):
                rows = use.node.inputs[0]
                assert rows is not None  # _tokens looked at it
                use.node.outputs[0].replace_all_uses_with(rows, replace_graph_outputs=True)
                if use.node.outputs[0] is self._logits:
                    self._logits = rows
                graph.remove(use.node, safe=True)
        for use in list(self._ids.uses()):
            if use.node is not self._sizes.producer():
                self._flatten(use.node)
        for node in self._nodes:
            self._attend(node, lengths)
        self._batch_logits()
        for value in (*self._lengths, *self._chosen):
            graph.inputs.remove(value)
        graph.inputs.insert(list(graph.inputs).index(self._ids) + 1, mask)

    def _find_lengths(self) -> list[ir.Value]:
        """Return the inputs that say where tokens belong.

        Raises:
            NoMatch: they are none of the graph, differ, or are read by other nodes.
        """
        slots: dict[ir.Value, int] = {}
        for node in self._nodes:
            for slot in _LENGTHS:
                value = _input(node, slot)
                if value is None and slot == METADATA:
                    continue
                if value is None or not _is_fed(value) or slots.setdefault(value, slot) != slot:
                    raise NoMatch(f"input {slot} of the operator is no input of the model", node)
        for value, slot in slots.items():
            for use in value.uses():
                if kind(use.node) != _PAGED or use.idx != slot:
                    raise NoMatch(f"{value.name} is read by {use.node.op_type}", use.node)
        for slot in (BOUNDS, PAST):
            if list(slots.values()).count(slot) > 1:
                raise NoMatch("its layers take tokens of different requests", self._nodes[0])
        return list(slots)

    def _mask(self) -> ir.Value:
        name = self._build.unique("attention_mask")
        return ir.Value(name=name, type=ir.TensorType(_INT64), shape=ir.Shape(_MASK_DIMS))

    def _counts(self, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the tokens of each sequence less one, and those of the longest."""
        build, batch = self._build, _BATCH[0]
        axis = build.integers(1)
        count = build.op(
            "ReduceSum", [mask, axis], "count", dtype=_INT64, shape=[batch], keepdims=0
        )
        last = build.op("Sub", [count, axis], "last", dtype=_INT64, shape=[batch])
        ends = build.op("Cast", [last], "seqlens_k", dtype=_INT32, shape=[batch], to=int(_INT32))
        size = build.dim(mask, 1, "size")
        longest = build.op("Squeeze", [size], "longest", dtype=_INT64, shape=[])
        total = build.op("Cast", [longest], "total", dtype=_INT32, shape=[], to=int(_INT32))
        return ends, total

    def _shape(self, width: int) -> ir.Value:
        """Return the sizes of a batch of sequences with so many numbers for each token."""

        def make() -> ir.Value:
            sizes = [self._sizes, self._build.integers(width)]
            with self._build.before(self._first, _SCOPE):
                return self._build.op("Concat", sizes, "shape", dtype=_INT64, shape=[3], axis=0)

        return self._build.once(("shape", width), make)

    def _batched(self, value: ir.Value, width: int) -> ir.Value:
        inputs = [value, self._shape(width)]
        shape = [*_BATCH, width]
        return self._build.op("Reshape", inputs, "batch", dtype=value.dtype, shape=shape)

    def _flat(self, value: ir.Value, width: int) -> ir.Value:
        """Return the rows of a batch, one behind the other."""
        inputs = [value, self._build.integers(-1, width)]
        return self._build.op("Reshape", inputs, "rows", dtype=value.dtype, shape=[None, width])

    def _flatten(self, node: ir.Node) -> None:
        """Put the rows of a table that tokens choose one behind the other."""
        looks_up = kind(node) in ("Gather", f"{MICROSOFT}.GatherBlockQuantized")
        axis = attribute_int(node, "axis", attribute_int(node, "gather_axis", 0))
        if not looks_up or axis or node.inputs[1] is not self._ids:
            raise NoMatch(f"{self._ids.name} is read by {node.op_type}", node)
        rows = node.outputs[0]
        width = static_dim(rows, 1)
        if rank(rows) != 2 or width is None or rows.is_graph_output():
            raise NoMatch("the graph does not show the width of the embeddings", node)
        uses = list(rows.uses())
        rows.shape = ir.Shape([*_BATCH, width])
        following = self._behind(node)
        with self._build.before(following, _SCOPE):
            flat = self._flat(rows, width)
        for use in uses:
            use.node.replace_input_with(use.idx, flat)

    def _behind(self, node: ir.Node) -> ir.Node:
        nodes = list(self._graph)
        index = nodes.index(node) + 1
        if index == len(nodes):
            raise NoMatch("nothing follows the embeddings", node)
        return nodes[index]

    def _attend(self, node: ir.Node, lengths: tuple[ir.Value, ir.Value]) -> None:
        """Put GroupQueryAttention in the place of a node."""
        heads, kv_heads = (attribute_int(node, name, 0) for name in ("num_heads", "kv_num_heads"))
        size = _head_size(node, kv_heads)
        caches = [_cache(node, slot, kv_heads, size) for slot in (KEY_CACHE, VALUE_CACHE)]
        packed = node.inputs[KEY] is None
        widths = (
            [(heads + 2 * kv_heads) * size] if packed else [heads * size, *[kv_heads * size] * 2]
        )
        weights = (_input(node, Q_NORM), _input(node, K_NORM), None)
        build = self._build
        with build.before(node, label(node)):
            rows: list[ir.Value | None] = [None, None, None]
            for slot, width in enumerate(widths):
                value = node.inputs[slot]
                assert value is not None  # _expect_known looked at it
                normed = self._normed(node, value, weights[slot], size, width)
                rows[slot] = self._batched(normed, width)
            inputs = [*rows, *caches, *lengths, _input(node, COS), _input(node, SIN), None, None]
            dtype = node.inputs[QUERY].dtype or caches[0].dtype  # type: ignore[union-attr]
            present = [_BATCH[0], kv_heads, _MASK_DIMS[1], size]
            result, *presents = build.ops(
                "GroupQueryAttention",
                [*inputs, _input(node, SINK)],
                "GroupQueryAttention",
                dtype=dtype,
                shapes=[[*_BATCH, heads * size], present, present],
                domain=MICROSOFT,
            )
            flat = self._flat(result, heads * size)
        attention = result.producer()
        assert attention is not None
        attention.attributes.update(
            {name: node.attributes[name] for name in _ATTRIBUTES if name in node.attributes}
        )
        node.outputs[0].replace_all_uses_with(flat)
        for old, new in zip(node.outputs[1:], presents, strict=True):
            index = list(self._graph.outputs).index(old)
            new.name, old.name = old.name, None
            new.type = old.type
            self._graph.outputs[index] = new
        self._graph.remove(node, safe=True)

    def _normed(
        self, node: ir.Node, value: ir.Value, weight: ir.Value | None, size: int, width: int
    ) -> ir.Value:
        """Return queries or keys after the norm of each head."""
        if weight is None:
            return value
        heads = self._flat(value, size)
        normed = self._build.op(
            "SimplifiedLayerNormalization",
            [heads, weight],
            "norm",
            dtype=value.dtype,
            shape=[None, size],
            axis=-1,
            stash_type=1,
        )
        maker = normed.producer()
        assert maker is not None
        epsilon = attribute_float(node, _EPSILON, 1e-6)
        maker.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon)
        return self._flat(normed, width)

    def _batch_logits(self) -> None:
        logits = self._logits
        width = static_dim(logits, 1)
        if rank(logits) != 2 or width is None:
            raise NoMatch(f"{logits.name} is not [tokens, vocabulary]")
        end = ir.node("Identity", [logits])
        self._graph.append(end)
        with self._build.before(end, _SCOPE):
            batched = self._batched(logits, width)
        self._graph.remove(end, safe=True)
        index = list(self._graph.outputs).index(logits)
        batched.name, logits.name = logits.name, self._build.unique(f"{logits.name}/rows")
        self._graph.outputs[index] = batched


def _is_fed(value: ir.Value) -> bool:
    return value.is_graph_input() and not value.is_initializer()


def _input(node: ir.Node, slot: int) -> ir.Value | None:
    return node.inputs[slot] if slot < len(node.inputs) else None


def _expect_known(node: ir.Node) -> None:
    """Refuse inputs and attributes that GroupQueryAttention has not, or with another meaning."""
    if node.attributes.get_string("kv_cache_layout", "SEPARATE") == "LATENT":
        raise NoMatch(_LATENT, node)
    for slot, reason in _REFUSED_INPUTS.items():
        if _input(node, slot) is not None:
            raise NoMatch(reason, node)
    if any(value is not None for value in node.inputs[SLOTS:]):
        raise NoMatch(
            f"the operator has {len(node.inputs)} inputs, of which {SLOTS} are known", node
        )
    _expect_attributes(node)
    if len(node.outputs) != 3:
        raise NoMatch("the operator does not return its caches", node)
    if any(_input(node, slot) is None for slot in (QUERY, KEY_CACHE, VALUE_CACHE)):
        raise NoMatch("the query or a cache is missing", node)
    for first, second in ((KEY, VALUE), (Q_NORM, K_NORM), (COS, SIN)):
        if (_input(node, first) is None) != (_input(node, second) is None):
            raise NoMatch(f"of the inputs {first} and {second} it has only one", node)
    if _input(node, KEY) is None and _input(node, Q_NORM) is not None:
        raise NoMatch("it norms queries and keys that are packed into one input", node)
    if node.outputs[0].is_graph_output():
        raise NoMatch("the result of attention is an output of the model", node)


def _expect_attributes(node: ir.Node) -> None:
    for name, attribute in node.attributes.items():
        if name in (*_ATTRIBUTES, _EPSILON):
            continue
        if name not in _DEFAULTS:
            raise NoMatch(f"the attribute {name} is not known", node)
        if attribute.value != _DEFAULTS[name]:
            raise NoMatch(f"the attribute {name} is {attribute.value}", node)


def _head_size(node: ir.Node, kv_heads: int) -> int:
    cache = node.inputs[KEY_CACHE]
    size = None if cache is None else static_dim(cache, 3)
    heads = attribute_int(node, "num_heads", 0)
    if size is None or kv_heads <= 0 or heads <= 0 or heads % kv_heads:
        raise NoMatch("the graph does not show the sizes of its heads", node)
    return size


def _cache(node: ir.Node, slot: int, heads: int, size: int) -> ir.Value:
    """Return the input of a cache, which becomes one of sequences.

    Raises:
        NoMatch: it is no cache of pages, or not the model's alone.
    """
    value, returned = node.inputs[slot], node.outputs[slot - KEY_CACHE + 1]
    assert value is not None
    if not _is_fed(value) or rank(value) != 4 or value.dtype not in FLOATS:
        raise NoMatch(f"{value.name} is no input with pages of floats", node)
    if (static_dim(value, 2), static_dim(value, 3)) != (heads, size):
        raise NoMatch(f"{value.name} is not [pages, slots, {heads}, {size}]", node)
    if len(list(value.uses())) != 1 or value.is_graph_output():
        raise NoMatch(f"{value.name} is read more than once", node)
    if not returned.is_graph_output() or list(returned.uses()):
        raise NoMatch(f"the cache behind {value.name} is read elsewhere, or not returned", node)
    value.shape = ir.Shape([_BATCH[0], heads, "past_sequence_length", size])
    return value


def _tokens(inputs: Iterable[ir.Value]) -> tuple[ir.Value, list[ir.Value]]:
    """Return the token ids, and the inputs that choose tokens whose logits are wanted.

    Raises:
        NoMatch: there are other inputs.
    """
    inputs = list(inputs)
    chosen = [value for value in inputs if _chooses(value, inputs)]
    ids = [value for value in inputs if value not in chosen]
    if not ids:
        raise NoMatch("no input for tokens was found")
    strange = next(
        (value for value in ids if rank(value) != 1 or value.dtype not in _INTEGERS), None
    )
    if strange is not None or len(ids) > 1:
        name = (strange or ids[-1]).name
        raise NoMatch(f"the model takes {name}, whose meaning for packed tokens is not known")
    for value in chosen:
        for use in value.uses():
            rows = use.node.inputs[0]
            if rows is None or rows.shape is None or ids[0].shape is None:
                raise NoMatch(f"{value.name} chooses from rows of an unknown size", use.node)
            if rows.shape[0] != ids[0].shape[0] or isinstance(rows.shape[0], int):
                raise NoMatch(f"{value.name} chooses other rows than those of tokens", use.node)
    return ids[0], chosen


def _chooses(value: ir.Value, inputs: Iterable[ir.Value]) -> bool:
    """Return True if an input only chooses rows that depend on another one."""
    uses = list(value.uses())
    sources = {source for source in inputs if source is not value}
    return bool(uses) and all(
        use.node.domain == ""
        and use.node.op_type == "Gather"
        and use.idx == 1
        and attribute_int(use.node, "axis", 0) == 0
        and not sources.isdisjoint(data_ancestors(filter(None, use.node.inputs[:1])))
        for use in uses
    )


def _logits(graph: ir.Graph, caches: set[ir.Value]) -> ir.Value:
    outputs = [value for value in graph.outputs if value not in caches]
    if len(outputs) != 1:
        names = ", ".join(str(value.name) for value in outputs)
        raise NoMatch(f"the model returns {names or 'no logits'} besides its caches")
    if outputs[0].producer() is None:
        raise NoMatch(f"{outputs[0].name} is no result")
    return outputs[0]
