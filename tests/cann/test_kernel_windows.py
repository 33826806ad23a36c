"""The exact window of recent tokens in the Ascend C kernels, run in the shim, against the oracle.

Entries to the byte, and nothing else of a cache is touched; attention to 1e-5. A ``Cache`` lives
through several calls, as the entries of one are what another finds, or no longer does.
"""

from __future__ import annotations

import numpy as np
import pytest

from simulated_kernels import (
    CODECS,
    INT4,
    Kernels,
    Middle,
    has_kernels,
    rotation_of,
    row_bytes,
)
from tests.parity.compare import check_rows
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.window import TAG_BYTES, Window, rows_per_entry, window_of

# The bench runs these; elsewhere test_kernels.py and test_decoder_kernels.py do.
pytestmark = pytest.mark.cann

HALF_STEP = 2.0**-11
"""Relative error of rounding to float16."""
BLOCK = 32
"""Bytes that 2002 moves at least."""
PRESETS = (64, 4)
"""Recent tokens and sinks of the presets."""

both_sizes = pytest.mark.parametrize("size", (64, 128))
both_types = pytest.mark.parametrize("dtype", ["float32", "float16"])


class Cache:
    """Keys and values of two KV heads, three queries each, that calls are run on."""

    heads, group = 2, 3

    def __init__(
        self,
        kernels: Kernels,
        size: int,
        tokens: int,
        *,
        batch: int = 1,
        entries: tuple[int, int] = PRESETS,
        codecs: tuple[Codec, Codec] | None = None,
        dtype: str = "float32",
        offsets: tuple[np.ndarray, np.ndarray] | tuple[None, None] = (None, None),
        part_tokens: int | None = None,
        cores: int = 3,
        sliding_window: int = 0,
        first_slot: int = 0,
        softcap: float = 0.0,
        sinks: np.ndarray | None = None,
    ) -> None:
        """Begins with caches of noise, which must not show."""
        codecs = codecs or (kernels.codec, kernels.codec)
        widths = [row_bytes(size, codec) for codec in codecs]
        self.kernels, self.codecs, self.size, self.dtype = kernels, codecs, size, dtype
        self.window = window_of(*entries, [(size, width) for width in widths])
        self.offsets, self.part_tokens, self.cores = offsets, part_tokens, cores
        self.sliding_window, self.softcap, self.sinks = sliding_window, softcap, sinks
        self.first_slot = first_slot
        self.rotations = (rotation_of(size), rotation_of(size, 1))
        self.rng = np.random.default_rng(tokens)
        slots = self.window.overlay_rows + tokens
        self.planes = [
            self.rng.integers(0, 60, (batch, self.heads, slots, width)).astype(np.uint8)
            for width in widths
        ]
        _tag_all(self.planes, size, self.window)  # an earlier sequence may have left them

    def vectors(self, tokens: int, heads: int) -> np.ndarray:
        shape = (self.planes[0].shape[0], heads, tokens, self.size)
        return self.rng.standard_normal(shape).astype(self.dtype)

    def call(
        self,
        lengths: int | np.ndarray,
        tokens: int,
        new: tuple[np.ndarray, np.ndarray] | None = None,
        *,
        joins: bool = False,
    ) -> np.ndarray:
        """Encodes and attends; returns the output, which is within 1e-5 of the oracle.

        With ``joins`` the tokens that cannot have an entry are attended to elsewhere.
        """
        given = new or (self.vectors(tokens, self.heads), self.vectors(tokens, self.heads))
        for side in range(2):
            self._encode(side, lengths, given[side])
        query = self.vectors(tokens, self.heads * self.group)
        middle = self._middle(query, int(lengths) + 1) if joins else None
        output = self.kernels.attention(
            query, *self.planes, lengths, self.rotations,
            scale=self.size**-0.5, codecs=self.codecs, offsets=self.offsets, window=self.window,
            new=given, cores=self.cores, part_tokens=self.part_tokens,
            sliding_window=self.sliding_window, softcap=self.softcap, sinks=self.sinks,
            first_slot=self.first_slot, middle=middle,
        )  # fmt: skip
        assert not self.kernels.hazards, self.kernels.messages()
        books = [codebook_of(codec, self.size).centroids for codec in self.codecs]
        expected = reference.attention(
            query, *self.planes, np.atleast_1d(lengths),
            key=self.codecs[0], value=self.codecs[1],
            key_rotation=self.rotations[0], key_codebook=books[0],
            value_rotation=self.rotations[1], value_codebook=books[1],
            scale=self.size**-0.5, causal=True,
            key_offset=self.offsets[0], value_offset=self.offsets[1],
            window=self.window, new_keys=given[0], new_values=given[1],
            sliding_window=self.sliding_window, softcap=self.softcap, head_sink=self.sinks,
            left_padding=np.array([self.first_slot]),
        )  # fmt: skip
        rounding = HALF_STEP * np.abs(expected) if self.dtype == "float16" else 0
        if middle is not None:
            lengths_of_averages = np.linalg.norm(middle.averages.astype(np.float64), axis=-1)
            rounding = rounding + HALF_STEP * lengths_of_averages[:, :, None, None]
        assert (np.abs(output - expected) - rounding).max() < 1e-5
        return output

    def _middle(self, query: np.ndarray, end: int) -> Middle | None:
        """Attention over codes between the sinks and the newest tokens, as CANN's gives it."""
        first = max(self.window.sinks, self.first_slot)
        if self.sliding_window:
            first = max(first, end - self.sliding_window)
        last = end - self.window.recent
        if first >= last:
            return None
        slots = slice(self.window.overlay_rows + first, self.window.overlay_rows + last)
        keys, values = (
            reference.decode(plane[:, :, slots], codec, rotation, codebook_of(codec, self.size))
            for plane, codec, rotation in zip(self.planes, self.codecs, self.rotations, strict=True)
        )
        grouped = query.astype(np.float64).reshape(len(query), self.heads, self.group, self.size)
        scores = grouped @ keys.swapaxes(-1, -2) * self.size**-0.5
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        averages = weights @ (values @ self.rotations[1].astype(np.float64)) / total
        shape = (len(query), self.heads * self.group)
        logs = (top + np.log(total)).reshape(shape).astype(np.float32)
        return Middle(first, last, averages.reshape(*shape, -1).astype(np.float16), logs)

    def _encode(self, side: int, lengths: int | np.ndarray, vectors: np.ndarray) -> None:
        codec, rotation, offset = self.codecs[side], self.rotations[side], self.offsets[side]
        before, tokens = self.planes[side], vectors.shape[2]
        after = self.kernels.encode(
            vectors, before, lengths, rotation,
            codec=codec, offset=offset, window=self.window, cores=self.cores,
        )  # fmt: skip
        assert not self.kernels.hazards, self.kernels.messages()
        each = np.broadcast_to(lengths, len(before))
        first = self.window.overlay_rows + each
        rows = np.stack([after[b, :, first[b] : first[b] + tokens] for b in range(len(before))])
        expected = reference.append(
            before, rows, np.atleast_1d(lengths), window=self.window, vectors=vectors
        )
        assert_cache(self.kernels, after, expected, self.size, self.window)
        encoded = vectors.astype(np.float32)
        if offset is not None:
            shift = reference.offset_rows(offset, np.atleast_1d(lengths), len(before), tokens)
            encoded = encoded - shift.astype(np.float32)
        if tokens > 0:
            check_rows(rows, encoded, codec, rotation)
        self.planes[side] = after


def _entries(plane: np.ndarray, size: int, window: Window) -> np.ndarray:
    """The entries of a plane ``[S, W]``: a view ``[entries, bytes]``."""
    rows = rows_per_entry(size, plane.shape[-1])
    return plane[: window.entries * rows].reshape(window.entries, rows * plane.shape[-1])


def _tag_all(planes: list[np.ndarray], size: int, window: Window) -> None:
    """Tags of tokens 0 .. entries - 1, as a sequence leaves them."""
    tags = np.arange(1, window.entries + 1, dtype="<u4").view(np.uint8).reshape(-1, TAG_BYTES)
    for plane in planes:
        for b, n in np.ndindex(plane.shape[:2]):
            _entries(plane[b, n], size, window)[:, 2 * size :][:, :TAG_BYTES] = tags


def assert_cache(
    kernels: Kernels, found: np.ndarray, expected: np.ndarray, size: int, window: Window
) -> None:
    """The same bytes; on 2002 but for the end of vectors whose tag is 0."""
    if kernels.arch == 2002:
        cleared = BLOCK - TAG_BYTES
        for b, n in np.ndindex(found.shape[:2]):
            theirs = _entries(expected[b, n], size, window)
            gone = (theirs[:, 2 * size :][:, :TAG_BYTES] == 0).all(-1)
            theirs[gone, 2 * size - cleared : 2 * size] = 0
            ours = _entries(found[b, n], size, window)
            ours[gone, 2 * size - cleared : 2 * size] = 0
    np.testing.assert_array_equal(found, expected)


@both_sizes
@both_types
def test_a_prompt_and_steps(coded: Kernels, size: int, dtype: str) -> None:
    cache = Cache(coded, size, 160, dtype=dtype)
    past = 0
    for tokens in (9, 1, 58, 1, 2, 1, 64, 1):
        cache.call(past, tokens)
        past += tokens


@both_sizes
@pytest.mark.parametrize("tokens", [1, 4, 63, 64, 68, 69, 130])
def test_a_first_prompt(coded: Kernels, size: int, tokens: int) -> None:
    cache = Cache(coded, size, tokens + 1)
    cache.call(0, tokens)
    cache.call(tokens, 1)


@both_types
def test_a_prompt_gives_what_its_tokens_give_one_by_one(coded: Kernels, dtype: str) -> None:
    whole, single = (Cache(coded, 64, 24, entries=(6, 2), dtype=dtype) for _ in range(2))
    keys, values = whole.vectors(24, 2), whole.vectors(24, 2)
    single.rng = np.random.default_rng(3)
    whole.rng = np.random.default_rng(3)
    query = whole.vectors(24, 6)
    whole.vectors = lambda tokens, heads: query  # type: ignore[method-assign]
    together = whole.call(0, 24, (keys, values))
    for t in range(24):
        single.vectors = lambda tokens, heads, t=t: query[:, :, t : t + 1]  # type: ignore[misc]
        alone = single.call(t, 1, (keys[:, :, t : t + 1], values[:, :, t : t + 1]))
        assert np.abs(together[:, :, t : t + 1] - alone).max() < 2e-3


@both_sizes
def test_rewinds_read_rows_of_what_is_lost(coded: Kernels, size: int) -> None:
    """Entries of later tokens are in the places of earlier ones, or nowhere."""
    cache = Cache(coded, size, 60, entries=(12, 3))
    for past, tokens in ((0, 30), (30, 5), (20, 1), (21, 4), (2, 1), (3, 9), (40, 2), (6, 7)):
        cache.call(past, tokens)


@both_sizes
def test_a_batch_of_different_lengths(coded: Kernels, size: int) -> None:
    """Padding behind a shorter sequence takes its entries; a length of 0 clears all tags."""
    cache = Cache(coded, size, 60, batch=3, entries=(12, 3))
    cache.call(0, 20)
    for lengths, tokens in (([20, 7, 0], 1), ([21, 8, 1], 3), ([24, 9, 2], 1)):
        cache.call(np.array(lengths), tokens)


@pytest.mark.cann
@pytest.mark.parametrize("entries", [(0, 3), (5, 0), (1, 0), (1, 1), (70, 0), (3, 66), (130, 70)])
def test_other_windows(coded: Kernels, entries: tuple[int, int]) -> None:
    cache = Cache(coded, 64, 240, entries=entries)
    past = 0
    for tokens in (3, 1, 140, 1, 70, 2, 1):
        cache.call(past, tokens)
        past += tokens
    cache.call(90, 3)


@pytest.mark.cann
@both_sizes
@pytest.mark.parametrize("bits", [1, 2, 3, 5])
def test_entries_of_every_codec(kernels: Kernels, bits: int, size: int) -> None:
    """Rows of other widths, and keys and values of two."""
    codecs = (CODECS[bits - 1], INT4)
    if not all(has_kernels(kernels.arch, codec, size) for codec in codecs):
        pytest.skip("2002 moves no rows of fewer than 32 bytes")
    cache = Cache(kernels, size, 40, entries=(8, 2), codecs=codecs)
    for past, tokens in ((0, 5), (5, 1), (6, 20), (26, 1)):
        cache.call(past, tokens)


@pytest.mark.parametrize(
    ("size", "dtype", "count"), [(64, "float16", 1), (128, "float32", 7), (128, "float16", 64)]
)
def test_entries_have_no_offset(coded: Kernels, size: int, dtype: str, count: int) -> None:
    rng = np.random.default_rng(count)
    shape = (count, 2, size)
    offsets = tuple(rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    cache = Cache(coded, size, 120, entries=(12, 3), dtype=dtype, offsets=offsets)
    for past, tokens in ((0, 1), (1, 30), (31, 1), (32, 60), (92, 1), (40, 2)):
        cache.call(past, tokens)


@both_sizes
@both_types
def test_vectors_that_are_no_numbers_or_too_large(coded: Kernels, size: int, dtype: str) -> None:
    """As entries have them: clamped, or zeros; zeros have no sign."""
    cache = Cache(coded, size, 60, entries=(12, 3), dtype=dtype)
    keys, values = cache.vectors(30, 2), cache.vectors(30, 2)
    values[0, 0, 1, 3], values[0, 1, 5, 0] = np.inf, np.nan
    keys[0, 0, 8, 2], keys[0, 0, 20, 2], values[0, 0, 28, 1] = -np.inf, np.nan, np.inf
    keys[0, 1, 9], values[0, 1, 29] = -0.0, -0.0
    values[0, 0, 25] *= 1e-6
    if dtype == "float32":
        values[0, 0, 26] *= 1e-7
    with np.errstate(invalid="ignore"):
        cache.call(0, 30, (keys, values))
        cache.call(30, 1)


def test_too_large_for_float16(kernels: Kernels) -> None:
    vectors = np.random.default_rng(2).standard_normal((1, 1, 9, 64)).astype(np.float32)
    vectors[0, 0, 3] *= 1e5
    vectors[0, 0, 4, 7] = -3e38
    window = window_of(4, 2, [(64, row_bytes(64))])
    before = np.zeros((1, 1, window.overlay_rows + 9, row_bytes(64)), np.uint8)
    after = kernels.encode(vectors, before, 0, rotation_of(64), window=window)
    assert not kernels.hazards, kernels.messages()
    rows = after[:, :, window.overlay_rows :]
    expected = reference.append(before, rows, np.zeros(1, np.int64), window=window, vectors=vectors)
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize(("size", "dtype"), [(64, "float16"), (128, "float32")])
def test_keys_in_parts(coded: Kernels, size: int, dtype: str) -> None:
    """The window is in the last part, and may leave nothing of it or of the one before."""
    cache = Cache(coded, size, 330, part_tokens=64, dtype=dtype)
    past = 0
    for tokens in (3, 62, 1, 120, 1, 5, 65, 1, 1):
        cache.call(past, tokens)
        past += tokens
    cache.call(100, 1)


@pytest.mark.cann
def test_parts_of_a_batch_of_different_lengths(coded: Kernels) -> None:
    cache = Cache(coded, 64, 230, batch=3, entries=(12, 3), part_tokens=64)
    cache.call(0, 200)
    for lengths in ([200, 70, 0], [201, 71, 1]):
        cache.call(np.array(lengths), 1)


@pytest.mark.cann
@pytest.mark.parametrize("part_tokens", [None, 64])
@pytest.mark.parametrize("sliding_window", [3, 12, 40, 100])
def test_beside_a_sliding_window(
    coded: Kernels, sliding_window: int, part_tokens: int | None
) -> None:
    """It may hide the sinks, all rows, or tokens of the exact window."""
    cache = Cache(
        coded, 64, 240, entries=(12, 3), part_tokens=part_tokens, sliding_window=sliding_window
    )
    past = 0
    for tokens in (3, 1, 30, 1, 120, 2):
        cache.call(past, tokens)
        past += tokens
    cache.call(100, 1)


@pytest.mark.parametrize("part_tokens", [None, 64])
@pytest.mark.parametrize("first_slot", [1, 7, 140])
def test_beside_padding_on_the_left(
    coded: Kernels, first_slot: int, part_tokens: int | None
) -> None:
    """It may hide sinks, rows, and all that a query has."""
    cache = Cache(coded, 64, 240, entries=(12, 3), part_tokens=part_tokens, first_slot=first_slot)
    past = 0
    for tokens in (3, 1, 30, 1, 120, 2):
        cache.call(past, tokens)
        past += tokens


def test_beside_all_that_scores_can_have(coded: Kernels) -> None:
    """A softcap and sinks of the heads, with offsets, which the exact keys have not."""
    rng = np.random.default_rng(4)
    offsets = tuple(rng.standard_normal((3, 2, 64)).astype(np.float32) for _ in range(2))
    cache = Cache(
        coded, 64, 120, entries=(12, 3), offsets=offsets, sliding_window=50, softcap=1.5,
        sinks=rng.standard_normal(6).astype(np.float32),
    )  # fmt: skip
    for past, tokens in ((0, 20), (20, 1), (21, 70), (91, 1)):
        cache.call(past, tokens)


@pytest.mark.parametrize("size, group", [(64, 1), (64, 3), (64, 12), (128, 5), (128, 8)])
def test_joining_what_another_attention_gave(coded: Kernels, size: int, group: int) -> None:
    """From the first token in the middle on; of a batch, with the sinks of heads."""
    dtype = "float32" if group % 4 else "float16"
    sinks = np.random.default_rng(5).standard_normal(2 * group).astype(dtype)
    cache = Cache(coded, size, 240, batch=2, entries=(12, 3), dtype=dtype, sinks=sinks)
    cache.group = group
    cache.call(0, 14)
    for past in range(14, 18):
        cache.call(past, 1, joins=True)
    cache.call(18, 90)
    cache.call(108, 1, joins=True)
    # Entries of later tokens are in the places of earlier ones: rows are read in front and behind.
    cache.call(80, 1, joins=True)
    cache.call(2, 1)
    cache.call(60, 1, joins=True)


@pytest.mark.parametrize("sliding_window", [0, 9, 13, 40])
@pytest.mark.parametrize("entries", [(12, 3), (0, 3), (12, 0), (130, 70)])
def test_joining_beside_padding_and_windows(
    kernels: Kernels, sliding_window: int, entries: tuple[int, int]
) -> None:
    for first_slot in (0, 2, 50):
        cache = Cache(
            kernels, 64, 260, entries=entries, sliding_window=sliding_window, first_slot=first_slot
        )
        cache.call(0, 66)
        cache.call(66, 1, joins=True)
        cache.call(67, 180)
        cache.call(247, 1, joins=True)


@pytest.mark.cann
@pytest.mark.parametrize("part_tokens", [None, 64])
def test_any_number_of_cores_gives_the_same_bits(coded: Kernels, part_tokens: int | None) -> None:
    outputs, planes = set(), set()
    for cores in (1, 8, 20, 40, 48):
        cache = Cache(coded, 64, 160, part_tokens=part_tokens, cores=cores)
        cache.call(0, 150)
        outputs.add(cache.call(150, 2).tobytes())
        planes.add(cache.planes[0].tobytes())
    assert len(outputs) == len(planes) == 1


def test_a_call_without_tokens_clears_tags(kernels: Kernels) -> None:
    window = window_of(*PRESETS, [(64, row_bytes(64))])
    before = np.full((2, 2, window.overlay_rows + 5, row_bytes(64)), 7, np.uint8)
    vectors = np.zeros((2, 2, 0, 64), np.float32)
    lengths = np.array([0, 3])
    after = kernels.encode(vectors, before, lengths, rotation_of(64), window=window)
    assert not kernels.hazards, kernels.messages()
    rows = np.zeros((2, 2, 0, row_bytes(64)), np.uint8)
    expected = reference.append(before, rows, lengths, window=window, vectors=vectors)
    assert_cache(kernels, after, expected, 64, window)


@both_sizes
def test_an_overlay_without_entries(coded: Kernels, size: int) -> None:
    """Rows of tokens begin behind it all the same."""
    cache = Cache(coded, size, 80, entries=(2, 1))
    cache.window = Window(0, 0, cache.window.overlay_rows)
    cache.call(0, 70)
    cache.call(70, 1)
