"""One layer of a model on one backend, step by step, each step compared with the oracle."""

from __future__ import annotations

import numpy as np
import onnxruntime

from tests.parity.backends import run, session
from tests.parity.compare import check_attention, check_rows
from tests.parity.graphs import KEY_LAYER, VALUE_LAYER, Attention, step_model, tables
from tests.parity.test_encode import as_dtype
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import Codebook
from tq_onnx.codec.spec import Codec

SENTINEL = 0xC3
LAYERS = {"key": KEY_LAYER, "value": VALUE_LAYER}
_EXPECTED: dict[int, np.ndarray] = {}
"""Results of the oracle, which is slow: backends nearly always write the same bytes."""


class Layer:
    """A layer's caches as one backend keeps them, each step checked with the oracle."""

    def __init__(
        self, backend: str, graph: Attention, kv_heads: int = 2, group: int = 2, seed: int = 0
    ) -> None:
        self.backend, self.graph = backend, graph
        self.kv_heads, self.heads = kv_heads, kv_heads * group
        self.random = np.random.RandomState(seed)
        self.length = 0
        self.caches = {side: self.empty(side, 0) for side in LAYERS}
        self.offsets: dict[str, np.ndarray] = {}

    def codec(self, side: str) -> Codec:
        return self.graph.key if side == "key" else self.graph.value

    def empty(self, side: str, slots: int) -> np.ndarray:
        row = reference.encode(
            np.zeros(self.graph.head_size),
            self.codec(side),
            *self.tables(side),
            element=self.graph.dtype,
        )
        width = len(row) + self.graph.padding
        return np.full((1, self.kv_heads, slots, width), SENTINEL, np.uint8)

    def tables(self, side: str) -> tuple[np.ndarray | None, Codebook | None]:
        graph = self.graph
        return tables(self.codec(side), graph.head_size, LAYERS[side], graph.rotation)

    def floats(self, heads: int, new: int) -> np.ndarray:
        x = self.random.standard_normal((1, heads, new, self.graph.head_size))
        x *= 10 ** self.random.uniform(-0.5, 0.5, (1, heads, new, 1))
        return as_dtype(x, self.graph.dtype)

    def feeds(self, new: int) -> dict[str, np.ndarray]:
        feeds = {side: self.floats(self.kv_heads, new) for side in LAYERS}
        feeds |= {f"{side}_offset": offset for side, offset in self.offsets.items()}
        feeds["query"] = self.floats(self.heads, new)
        return feeds | {"past_length": np.array([self.length], np.int64)}

    def step(self, new: int) -> None:
        """Grows the caches, or writes into them where they have room."""
        feeds = self.feeds(new)
        past = {f"past_{side}": cache for side, cache in self.caches.items()}
        output, *presents = run(self.backend, step_model(self.graph), feeds | past)
        self.check(new, feeds, output, dict(zip(LAYERS, presents, strict=True)))

    def step_in_place(self, new: int) -> None:
        """Gives the same buffers as past and present."""
        feeds = self.feeds(new)
        values = {
            side: onnxruntime.OrtValue.ortvalue_from_numpy(cache)
            for side, cache in self.caches.items()
        }
        opened = session(self.backend, step_model(self.graph))
        binding = opened.io_binding()
        binding.bind_output("output")
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for side, value in values.items():
            binding.bind_ortvalue_input(f"past_{side}", value)
            binding.bind_ortvalue_output(f"present_{side}", value)
        opened.run_with_iobinding(binding)
        presents = {side: value.numpy().copy() for side, value in values.items()}
        self.check(new, feeds, binding.copy_outputs_to_cpu()[0], presents)

    def check(
        self,
        new: int,
        feeds: dict[str, np.ndarray],
        output: np.ndarray,
        presents: dict[str, np.ndarray],
    ) -> None:
        graph, lengths = self.graph, np.array([self.length], np.int64)
        rows = slice(self.length, self.length + new)
        for side in LAYERS:
            vectors = feeds[side]
            if self.offsets:
                # Subtracted in float32, as the backends do: what is compared is the codec.
                own = reference.offset_rows(self.offsets[side], lengths, 1, new)
                vectors = vectors.astype(np.float32) - own.astype(np.float32)
            check_rows(
                self.backend,
                presents[side][:, :, rows],
                vectors,
                self.codec(side),
                self.tables(side)[0],
                norm_correction=graph.norm_correction,
                element=graph.dtype,
            )
            # Nothing else was touched.
            kept = presents[side].copy()
            slots = self.caches[side].shape[2]
            before = np.full_like(kept, SENTINEL)
            before[:, :, :slots] = self.caches[side]
            before[:, :, rows] = kept[:, :, rows]
            assert np.array_equal(kept, before)
        self.caches = presents
        check_attention(self.backend, graph.dtype, output, self.expected(feeds["query"]))
        self.length += new

    def expected(self, query: np.ndarray) -> np.ndarray:
        """Attention of the oracle over the caches as this backend wrote them."""
        graph = self.graph
        arrays = (query, *self.caches.values(), *self.offsets.values())
        known = (graph, self.length, *(array.tobytes() for array in arrays))
        if (key := hash(known)) in _EXPECTED:
            return _EXPECTED[key]
        books = {side: self.tables(side)[1] for side in LAYERS}
        centroids = {s: None if book is None else book.centroids for s, book in books.items()}
        _EXPECTED[key] = reference.attention(
            query,
            self.caches["key"],
            self.caches["value"],
            np.array([self.length], np.int64),
            key=graph.key,
            value=graph.value,
            key_rotation=self.tables("key")[0],
            key_codebook=centroids["key"],
            value_rotation=self.tables("value")[0],
            value_codebook=centroids["value"],
            scale=graph.scale,
            causal=True,
            key_offset=self.offsets.get("key"),
            value_offset=self.offsets.get("value"),
            element=graph.dtype,
        )
        return _EXPECTED[key]
