"""Our operators on the device without our kernels: CANN's own attend and encode.

What is expected is computed here, from the codes that the device wrote: attention over them in
float64, by the layout of docs/operators.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from simulated_kernels import rotation_of
from tests.cann.fake_acl import FakeAcl
from tests.cann.session import CANN, Array, CannSession, model_of
from tq_onnx.runtime.library import get_library_path

pytestmark = pytest.mark.cann

CODEC = "uniform"
ATTENTION = "aclnnFusedInferAttentionScoreV2"
ENCODE = "op.aclnnDynamicQuant"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model: ``heads`` KV heads with ``group`` query heads each."""

    head_size: int = 64
    heads: int = 2
    group: int = 2
    batch: int = 1
    slots: int = 48

    @property
    def cache(self) -> tuple[int, ...]:
        return (self.batch, self.heads, self.slots, self.head_size // 2 + 4)

    def vectors(self, tokens: int, dtype: str, seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        heads = {"query": self.heads * self.group, "key": self.heads, "value": self.heads}
        return {
            name: rng.standard_normal((self.batch, count, tokens, self.head_size)).astype(dtype)
            for name, count in heads.items()
        }


def layer(dtype: str, sizes: Sizes, sliding_window: int = 0, left_padding: str = "") -> bytes:
    """Both encodes and the attention."""
    element = {"float32": "float", "float16": "float16"}[dtype]
    encode = "ai.turboquant.TurboQuantEncode<codec = \"%s\", bits = 4, planes = 1, norm_correction = 0>" % CODEC
    text = f"""({element}[B, H, T, D] query, {element}[B, N, T, D] key, {element}[B, N, T, D] value,
        uint8[B, N, S, W] past_key, uint8[B, N, S, W] past_value, int64[L] past_length)
        => ({element}[B, H, T, D] output, uint8[B, N, S, W] present_key, uint8[B, N, S, W] present_value) {{
        present_key = {encode} (key, past_key, past_length, key_rotation, book, book)
        present_value = {encode} (value, past_value, past_length, value_rotation, book, book)
        output = ai.turboquant.TurboQuantDequantAttention<scale = {sizes.head_size**-0.5},
            causal = 1, sliding_window = {sliding_window}, softcap = 0.0, planes = 1, key_codec = "{CODEC}",
            key_bits = 4, value_codec = "{CODEC}", value_bits = 4> (query, present_key, present_value, past_length,
            key_rotation, book, value_rotation, book{left_padding}) }}"""
    rotations = {f"{side}_rotation": rotation_of(sizes.head_size, n) for n, side in enumerate(("key", "value"))}
    return model_of(text, {**rotations, "book": np.zeros(1, np.float32)}, ours=True)


def decoded(cache: Array, rotation: Array, head_size: int) -> Array:
    """Rows of a cache in planes, as vectors [B, N, S, D]."""
    batch, heads, slots, width = cache.shape
    flat = cache.reshape(batch, -1)
    count = heads * slots * head_size // 2
    low, high = (flat[:, :count].reshape(batch, heads, slots, -1) >> s & 15 for s in (0, 4))
    codes = (np.concatenate([low, high], -1) ^ 8).astype(np.int64) - 8
    scales = np.ascontiguousarray(flat[:, count:]).view("<f4").reshape(batch, heads, slots, 1)
    return np.asarray(codes * scales.astype(np.float64) @ rotation.astype(np.float64).T)


class Decoding:
    """Steps of the layer in a session with bound caches."""

    def __init__(self, dtype: str, sizes: Sizes, folder: Path) -> None:
        self.dtype, self.sizes = dtype, sizes
        self.session = CannSession(layer(dtype, sizes), folder, library=get_library_path())
        self.caches = {
            kind: ort.OrtValue.ortvalue_from_numpy(np.zeros(sizes.cache, np.uint8), "cann", 0)
            for kind in ("key", "value")
        }
        self.vectors: dict[str, Array] = {
            kind: np.zeros((sizes.batch, sizes.heads, 0, sizes.head_size)) for kind in self.caches
        }

    def step(self, past: list[int], vectors: dict[str, Array]) -> Array:
        binding = self.session.session.io_binding()
        for name, array in {**vectors, "past_length": np.array(past)}.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("output")
        for kind, cache in self.caches.items():
            binding.bind_ortvalue_input(f"past_{kind}", cache)
            binding.bind_ortvalue_output(f"present_{kind}", cache)
        self.session.session.run_with_iobinding(binding)
        return np.asarray(binding.get_outputs()[0].numpy())

    def rows(self) -> dict[str, Array]:
        size = self.sizes.head_size
        return {
            kind: decoded(cache.numpy(), rotation_of(size, n), size)
            for n, (kind, cache) in enumerate(self.caches.items())
        }

    def expected(self, past: list[int], query: Array) -> Array:
        """The attention over what the caches have now."""
        rows, sizes = self.rows(), self.sizes
        out = np.zeros(query.shape)
        for b, h, t in np.ndindex(*query.shape[:3]):
            keys, values = (
                rows[kind][b, h // sizes.group, : past[b % len(past)] + t + 1] for kind in rows
            )
            scores = keys @ query[b, h, t].astype(np.float64) * sizes.head_size**-0.5
            weights = np.exp(scores - scores.max())
            out[b, h, t] = weights @ values / weights.sum()
        return out


@pytest.fixture
def no_kernels(fake: FakeAcl, monkeypatch: pytest.MonkeyPatch) -> FakeAcl:
    monkeypatch.delenv("TQ_ONNX_CANN_KERNELS", raising=False)
    return fake


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(128, 1, 4, 3)])
def test_without_kernels(no_kernels: FakeAcl, tmp_path: Path, dtype: str, sizes: Sizes) -> None:
    """A prompt in two chunks, then tokens; sequences of one length and of several."""
    decoding = Decoding(dtype, sizes, tmp_path)
    no_kernels.set_delay(300)
    lengths = [0] * sizes.batch
    for seed, tokens in enumerate((9, 4, 1, 1)):
        vectors = sizes.vectors(tokens, dtype, seed)
        out = decoding.step(lengths, vectors)
        np.testing.assert_allclose(out, decoding.expected(lengths, vectors["query"]), atol=4e-3)
        rows = decoding.rows()
        for b, kind in ((b, kind) for b in range(sizes.batch) for kind in rows):
            wanted = vectors[kind][b].astype(np.float64)
            made = rows[kind][b, :, lengths[b] : lengths[b] + tokens]
            error = ((made - wanted) ** 2).sum() / (wanted**2).sum()
            assert error < 0.03
        lengths = [n + tokens - (b if tokens == 4 else 0) for b, n in enumerate(lengths)]
    counts = no_kernels.counts()
    assert counts[ENCODE] == 8
    assert counts[f"op.{ATTENTION}"] == 4 * sizes.batch
    assert {node.provider for node in decoding.session.end()} == {CANN}
