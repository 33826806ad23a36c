"""What a query sees and how its scores are bounded, in the shim: windows, padding, softcap, sinks.

``test_kernels.py`` has sizes, lengths and cores, ``test_kernel_codecs.py`` the codecs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from simulated_kernels import INT4, Kernels, rotation_of
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import codebook_of

# The bench runs these; elsewhere test_kernels.py and test_decoder_kernels.py do.
pytestmark = pytest.mark.cann

TILE = 64
SOFTCAPS = (1.0, 50.0, 100.0)
LOWEST = np.finfo(np.float32).min

each_size_and_type = pytest.mark.parametrize(
    ("size", "dtype"), [(64, "float32"), (64, "float16"), (128, "float32"), (128, "float16")]
)


@cache
def rows_of(size: int, layer: int, tokens: int) -> np.ndarray:
    """Encoded random vectors ``[2, 2, tokens, W]``, longer than the ones of other tests."""
    vectors = 2 * np.random.default_rng(layer).standard_normal((2, 2, tokens, size))
    return reference.encode(vectors, INT4, rotation_of(size, layer), codebook_of(INT4, size))


def attend(
    kernels: Kernels,
    size: int,
    dtype: str,
    past: int,
    new: int,
    *,
    group: int = 2,
    first_slot: int = 0,
    sinks: bool = False,
    offset_rows: int = 0,
    cores: int = 3,
    part_tokens: int | None = None,
    **options: Any,
) -> tuple[np.ndarray, float]:
    """Outputs and their largest error, over garbage in the slots that no query sees."""
    rng = np.random.default_rng(past * 100 + new)
    rotations = (rotation_of(size), rotation_of(size, 1))
    caches = [rows_of(size, layer, 400)[:, :, : past + new].copy() for layer in (0, 1)]
    window = options.get("sliding_window", 0)
    unseen = max(first_slot, past + 1 - window if window else 0)
    for cache_of in caches:
        cache_of[:, :, : min(unseen, past + new)] = 0xFF  # scales are NaN
    query = (2 * rng.standard_normal((2, 2 * group, new, size))).astype(dtype)
    offsets: Any = (None, None)
    if offset_rows:
        offsets = tuple(
            rng.standard_normal((offset_rows, 2, size)).astype(np.float32) for _ in range(2)
        )
    given = None
    if sinks:
        given = rng.standard_normal(2 * group).astype(dtype)
        given[0] = -np.inf
    output = kernels.attention(
        query, *caches, past, rotations, scale=size**-0.5, offsets=offsets, first_slot=first_slot,
        sinks=given, cores=cores, part_tokens=part_tokens, **options,
    )  # fmt: skip
    assert not kernels.hazards, kernels.messages()
    bias = np.where(np.arange(past + new) < first_slot, LOWEST, np.float32(0))
    for cache_of in caches:
        cache_of[:, :, : min(unseen, past + new)] = 0
    centroids = codebook_of(INT4, size).centroids
    expected = reference.attention(
        query, *caches, np.array([past]),
        key=INT4, value=INT4, key_rotation=rotations[0], key_codebook=centroids,
        value_rotation=rotations[1], value_codebook=centroids, scale=size**-0.5, causal=True,
        key_offset=offsets[0], value_offset=offsets[1], head_sink=given,
        attention_bias=bias[None, None, None], **options,
    )  # fmt: skip
    rounding = 2.0**-11 * np.abs(expected) if dtype == "float16" else 0
    hidden = (expected == 0).all(axis=-1)
    assert (output[hidden] == 0).all()
    return output, float((np.abs(output - expected) - rounding).max())


@each_size_and_type
def test_a_sliding_window(kernels: Kernels, size: int, dtype: str) -> None:
    """Windows that end within tiles, at their ends and before the first key; prompts and steps."""
    for window, past, new in (
        *((1, 0, 1), (1, 200, 3), (5, 3, 1), (63, 127, 1), (64, 127, 1), (64, 128, 1)),
        *((65, 128, 9), (30, 0, 90), (100, 300, 5), (1000, 70, 4)),
    ):
        options = {"sliding_window": window}
        assert attend(kernels, size, dtype, past, new, **options)[1] < 1e-5
        assert attend(kernels, size, dtype, past, new, part_tokens=TILE, **options)[1] < 1e-5


@each_size_and_type
def test_padding_on_the_left(kernels: Kernels, size: int, dtype: str) -> None:
    """Queries of padding see nothing: zeros, whatever rows and offsets are."""
    for first, past, new in ((1, 0, 4), (3, 0, 9), (64, 70, 1), (70, 0, 90), (200, 250, 5)):
        for part_tokens in (None, TILE):
            for offset_rows in (0, 5):
                _, error = attend(
                    kernels, size, dtype, past, new,
                    first_slot=first, part_tokens=part_tokens, offset_rows=offset_rows,
                )  # fmt: skip
                assert error < 1e-5


@each_size_and_type
@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_a_softcap(kernels: Kernels, size: int, dtype: str, softcap: float) -> None:
    for past, new in ((0, 3), (150, 1), (100, 9)):
        for part_tokens in (None, TILE):
            _, error = attend(
                kernels, size, dtype, past, new, softcap=softcap, part_tokens=part_tokens
            )
            assert error < 1e-5


@each_size_and_type
@pytest.mark.parametrize("group", [1, 3, 12])
def test_a_sink_of_each_head(kernels: Kernels, size: int, dtype: str, group: int) -> None:
    for past, new in ((0, 3), (150, 1)):
        for part_tokens in (None, TILE):
            _, error = attend(
                kernels, size, dtype, past, new, group=group, sinks=True, part_tokens=part_tokens
            )
            assert error < 1e-5


@each_size_and_type
def test_all_of_them_together(kernels: Kernels, size: int, dtype: str) -> None:
    for past, new in ((0, 9), (90, 1), (290, 5)):
        for part_tokens in (None, TILE):
            _, error = attend(
                kernels, size, dtype, past, new, sliding_window=80, first_slot=4, softcap=20.0,
                sinks=True, offset_rows=7, part_tokens=part_tokens,
            )  # fmt: skip
            assert error < 1e-5


@pytest.mark.parametrize("new", [1, 9])
def test_the_same_bits_on_any_number_of_cores(kernels: Kernels, new: int) -> None:
    outputs = set()
    for cores in (1, 8, 20, 40, 48):
        found, _ = attend(
            kernels, 64, "float32", 390 - new, new, sliding_window=200, first_slot=70,
            softcap=30.0, sinks=True, offset_rows=3, cores=cores, part_tokens=TILE,
        )  # fmt: skip
        outputs.add(found.tobytes())
    assert len(outputs) == 1


def test_what_is_not_seen_costs_nothing(kernels: Kernels) -> None:
    """A step over a window costs as many instructions in a long cache as in a short one."""
    counts = []
    for past in (127, 383):
        kernels.reset()
        attend(kernels, 64, "float32", past, 1, sliding_window=64, cores=1)
        counts.append(kernels.vector_instructions)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("seen", [np.inf, np.nan])
def test_a_softcap_of_what_is_no_number(kernels: Kernels, seen: float) -> None:
    """Only the query that has one is lost."""
    query = np.random.default_rng(12).standard_normal((1, 2, 1, 64)).astype(np.float32)
    query[0, 1, 0, 3] = seen
    keys, values = (rows_of(64, layer, 400)[:1, :1, :100] for layer in (0, 1))
    rotations = (rotation_of(64), rotation_of(64, 1))
    found = kernels.attention(query, keys, values, 99, rotations, scale=0.1, softcap=30.0)
    assert not kernels.hazards, kernels.messages()
    assert np.isfinite(found[0, 0]).all()
    assert not np.isfinite(found[0, 1]).all()
