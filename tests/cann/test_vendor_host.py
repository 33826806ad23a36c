"""Our operators on the device without our kernels: CANN's own attend and encode.

What is expected is computed here, from the codes that the device wrote: attention over them in
float64, by the layout of docs/operators.md.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from simulated_kernels import SIGNED4, rotation_of
from tests.cann.decoder_models import feeds_of, model_of_operator
from tests.cann.fake_acl import FakeAcl
from tests.cann.session import CANN, Array, CannSession, model_of, on_cpu
from tests.cann.test_host_decoder_operators import SHAPES
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.window import NO_WINDOW, Window
from tq_onnx.ops.domain import GATHER, ROTARY_EMBEDDING
from tq_onnx.runtime.library import get_library_path

pytestmark = pytest.mark.cann

CODEC = "uniform_signed"
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


def model_of_layer(
    dtype: str,
    sizes: Sizes,
    sliding_window: int,
    padding: Sequence[int],
    *,
    exact: Window = NO_WINDOW,
    head_sink: Array | None = None,
) -> bytes:
    """Both encodes and the attention."""
    element = {"float32": "float", "float16": "float16"}[dtype]
    new = "key, value" if exact.entries else ", "
    sink = "" if head_sink is None else "head_sink"
    optional = f", , {sink}, , , {new}, {'padding' if padding else ''}".rstrip(", ")
    entries = f"""recent = {exact.recent}, sinks = {exact.sinks},
        overlay_rows = {exact.overlay_rows}"""
    encode = f"""ai.turboquant.TurboQuantEncode<codec = "{CODEC}", bits = 4, planes = 1,
        norm_correction = 0, {entries}>"""
    text = f"""({element}[B, H, T, D] query, {element}[B, N, T, D] key, {element}[B, N, T, D] value,
        uint8[B, N, S, W] past_key, uint8[B, N, S, W] past_value, int64[L] past_length)
        => ({element}[B, H, T, D] output, uint8[B, N, S, W] present_key,
            uint8[B, N, S, W] present_value) {{
        present_key = {encode} (key, past_key, past_length, key_rotation, book, bounds)
        present_value = {encode} (value, past_value, past_length, value_rotation, book, bounds)
        output = ai.turboquant.TurboQuantDequantAttention<scale = {sizes.head_size**-0.5},
            causal = 1, sliding_window = {sliding_window}, softcap = 0.0, planes = 1, {entries},
            key_codec = "{CODEC}", key_bits = 4, value_codec = "{CODEC}", value_bits = 4>
            (query, present_key, present_value, past_length, key_rotation, book, value_rotation,
            book{optional}) }}"""
    constants: dict[str, Array] = {"padding": np.array(padding)} if padding else {}
    if head_sink is not None:
        constants["head_sink"] = head_sink
    for layer, side in enumerate(("key", "value")):
        constants[f"{side}_rotation"] = rotation_of(sizes.head_size, layer)
    book = codebook_of(SIGNED4, sizes.head_size)  # only our kernels read it
    constants |= {"book": book.centroids, "bounds": book.boundaries}
    return model_of(text, constants, ours=True)


def decoded(cache: Array, rotation: Array, head_size: int) -> Array:
    """Rows of a cache in planes, as vectors [B, N, S, D]."""
    batch, heads, slots = cache.shape[:3]
    flat = cache.reshape(batch, -1)
    count = heads * slots * head_size // 2
    low, high = (flat[:, :count].reshape(batch, heads, slots, -1) >> s & 15 for s in (0, 4))
    codes = (np.concatenate([low, high], -1) ^ 8).astype(np.int64) - 8
    scales = np.ascontiguousarray(flat[:, count:]).view("<f4").reshape(batch, heads, slots, 1)
    return np.asarray(codes * scales.astype(np.float64) @ rotation.astype(np.float64).T)


class Decoding:
    """Steps of the layer in a session with bound caches."""

    def __init__(
        self,
        dtype: str,
        sizes: Sizes,
        folder: Path,
        window: int = 0,
        padding: Sequence[int] = (),
        *,
        exact: Window = NO_WINDOW,
        head_sink: Array | None = None,
    ) -> None:
        self.dtype, self.sizes, self.window = dtype, sizes, window
        self.padding = list(padding) or [0] * sizes.batch
        self.exact, self.head_sink = exact, head_sink
        model = model_of_layer(dtype, sizes, window, padding, exact=exact, head_sink=head_sink)
        self.session = CannSession(model, folder, library=get_library_path())
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
            end = past[b % len(past)] + t + 1
            first = max(self.padding[b], end - self.window if self.window else 0)
            if first >= end:
                continue
            keys, values = (rows[kind][b, h // sizes.group, first:end] for kind in rows)
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


@pytest.mark.parametrize("window", [0, 5])
def test_padding_on_the_left_and_a_sliding_window(
    no_kernels: FakeAcl, tmp_path: Path, window: int
) -> None:
    """Some queries see nothing, and one sequence has no padding."""
    sizes = Sizes(batch=3)
    decoding = Decoding("float16", sizes, tmp_path, window, padding=(3, 0, 12))
    past = 0
    for seed, tokens in enumerate((9, 1, 6, 1)):
        vectors = sizes.vectors(tokens, "float16", seed)
        out = decoding.step([past], vectors)
        np.testing.assert_allclose(out, decoding.expected([past], vectors["query"]), atol=4e-3)
        past += tokens


@pytest.mark.parametrize(("padding", "tokens"), [(0, 4), (3, 4), (0, 1)])
def test_only_used_slots_are_decoded(
    no_kernels: FakeAcl, tmp_path: Path, padding: int, tokens: int
) -> None:
    """A prompt decodes what it reads, and not the capacity; a single token decodes nothing."""
    sizes = Sizes()
    decoding = Decoding("float16", sizes, tmp_path, padding=(padding,) if padding else ())
    vectors = sizes.vectors(tokens, "float16", 1)
    no_kernels.reset()
    out = decoding.step([6], vectors)
    np.testing.assert_allclose(out, decoding.expected([6], vectors["query"]), atol=4e-3)
    used = 6 + tokens - padding if tokens > 1 else 0
    assert used < sizes.slots
    decoded = no_kernels.counts().get("elements.aclnnAscendAntiQuant", 0)
    assert decoded == 2 * sizes.heads * used * sizes.head_size


@pytest.mark.parametrize("refused", [f"{ATTENTION} of INT4", "aclnnAscendAntiQuant"])
def test_codes_that_cann_refuses_are_decoded(tmp_path: Path, refused: str) -> None:
    """In a process of its own: what is refused is remembered. Without any way it is said."""
    script = f"""
import ctypes, sys
from pathlib import Path
import numpy as np
from tests.cann.fake_acl import FakeAcl
from tests.cann.test_vendor_host import Decoding, Sizes
fake, sizes = FakeAcl.load(), Sizes()
refuse = ctypes.CDLL("libopapi.so").fake_acl_refuse_operator
refuse({refused.encode()!r})
decoding = Decoding("float32", sizes, Path(sys.argv[1]))
for past in range(3):
    vectors = sizes.vectors(1, "float32", past)
    out = decoding.step([past], vectors)
    np.testing.assert_allclose(out, decoding.expected([past], vectors["query"]), atol=4e-3)
print(fake.counts().get("op.{ATTENTION}", 0), fake.counts().get("op.aclnnAscendAntiQuant", 0))
assert fake.violations() == 0, fake.last_violation()
if len(sys.argv) > 2:
    refuse(b"{ATTENTION}")
    decoding.step([3], sizes.vectors(2, "float32", 3))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TQ_ONNX_CANN_KERNELS", None)
    command = [sys.executable, "-c", script, str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    is_refused = refused.endswith("INT4")
    # Decoding is two operators of each cache, where codes are not attended to.
    assert ran.stdout.split() == ["3", "6" if is_refused else "0"]
    assert ran.stderr.count("CANN's attention over codes is not used") == is_refused
    ran = subprocess.run(
        [*command, "all"], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode != 0
    assert "CANN refuses the attention" in ran.stderr


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_the_decoders_operators(
    no_kernels: FakeAcl, tmp_path: Path, case: tuple[str, tuple[int, ...]], dtype: str
) -> None:
    """Float16 has cosines of that type: CANN's operator takes no others."""
    op, shape = case
    model, feeds = model_of_operator(op, dtype), feeds_of(op, dtype, shape)
    session = CannSession(model, tmp_path, library=get_library_path())
    (ours,) = session.run(feeds)
    (theirs,) = on_cpu(model, feeds, get_library_path())
    assert {node.provider for node in session.end()} == {CANN}
    assert ours.dtype == theirs.dtype
    error = np.abs(ours.astype(np.float64) - theirs).max() / max(1, np.abs(theirs).max())
    assert error <= (1e-6 if dtype == "float32" else 2**-10)
    if op != GATHER:
        assert any(name.startswith("op.aclnn") for name in no_kernels.counts())


POSITIONS = {
    "one row for all": [[5, 6, 7, 8]],
    "others for each": [[0, 1, 2, 3], [5, 6, 7, 8], [36, 37, 38, 39]],
    "padding before": [[1, 1, 0, 1]] * 3,
}


@pytest.mark.parametrize("case", POSITIONS)
def test_positions_of_several_sequences(no_kernels: FakeAcl, tmp_path: Path, case: str) -> None:
    positions = np.array(POSITIONS[case], np.int64)
    feeds = feeds_of(ROTARY_EMBEDDING, "float32", (3, 2, 4, 64), position_ids=positions)
    model = model_of_operator(ROTARY_EMBEDDING, "float32")
    (ours,) = CannSession(model, tmp_path, library=get_library_path()).run(feeds)
    (theirs,) = on_cpu(model, feeds, get_library_path())
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


SKIP, LATE, SHIFT, NUMBER = range(4)
CASES: dict[str, tuple[Sizes, str, int, tuple[int, ...], int, int]] = {
    # Sizes, type, sliding window, padding, the past, and new tokens of the step with the mistake.
    "a token": (Sizes(), "float32", 0, (), 9, 1),
    "a float16 token of several sequences": (Sizes(128, 1, 4, 2), "float16", 0, (), 9, 1),
    "a token behind padding": (Sizes(batch=2), "float16", 0, (3, 5), 9, 1),
    "a prompt": (Sizes(), "float32", 0, (), 0, 6),
    "a later chunk": (Sizes(heads=1, batch=2), "float16", 0, (), 9, 6),
    "a chunk in a sliding window behind padding": (Sizes(), "float16", 4, (6,), 5, 6),
}


@pytest.mark.parametrize("case", CASES)
def test_mistakes_in_calls_are_seen(no_kernels: FakeAcl, tmp_path: Path, case: str) -> None:
    """Every call left out, every tensor moved, every number changed: the output is another one.

    A call that may as well run later is no mistake, nor is a number that CANN ignores: the sparse
    mode and both token counts for one token, and the counts where there is no sliding window.
    """
    sizes, dtype, window, padding, past, tokens = CASES[case]
    decoding = Decoding(dtype, sizes, tmp_path, window, padding)
    if past:
        decoding.step([0], sizes.vectors(past, dtype, 1))
    ignored = {2, 3, 4} if tokens == 1 else set() if window else {3, 4}
    total, missed = mistakes(no_kernels, decoding, past, tokens, ignored)
    print(f"{case}: {total} mistakes")
    assert not missed, f"{len(missed)} of {total}: {missed}"


def mistakes(
    fake: FakeAcl, decoding: Decoding, past: int, tokens: int, ignored: set[int]
) -> tuple[int, list[tuple[int, int, int]]]:
    """How many mistakes were made in the calls of a step, and those that nobody saw."""
    library = ctypes.CDLL("libopapi.so")
    vectors, others = (decoding.sizes.vectors(tokens, decoding.dtype, seed) for seed in (2, 3))
    kept = {kind: cache.numpy() for kind, cache in decoding.caches.items()}

    def outcome(mistake: tuple[int, int, int] = (-1, 0, 0)) -> tuple[Array, ...]:
        # Nothing of an earlier run with these vectors is left in the device's memory.
        for given in (others, vectors):
            for kind, rows in kept.items():
                decoding.caches[kind] = ort.OrtValue.ortvalue_from_numpy(rows, "cann", 0)
            fake.reset()
            library.fake_acl_mutate_operator(*(mistake if given is vectors else (-1, 0, 0)))
            out = decoding.step([past], given)
        return out, *(cache.numpy() for cache in decoding.caches.values())

    expected = outcome()
    counts = fake.counts()
    calls = sum(count for name, count in counts.items() if name.startswith("op.aclnn"))
    missed, total = [], 0
    made = [
        *((SKIP, 0), (LATE, 0)),
        *((SHIFT, n) for n in range(8)),
        *((NUMBER, n) for n in range(9) if n not in ignored),
    ]
    for call, (kind, which) in itertools.product(range(calls), made):
        try:
            found = outcome((kind, call, which))
            is_seen = any(
                not np.array_equal(a, b, equal_nan=a.dtype != np.uint8)
                for a, b in zip(found, expected, strict=True)
            )
        except Exception:
            is_seen = True
        if not library.fake_acl_was_mutated():
            continue
        total += 1
        fake.reset()
        if not is_seen:
            missed.append((call, kind, which))
    library.fake_acl_mutate_operator(-1, 0, 0)
    assert total >= 2 * calls
    return total, missed
