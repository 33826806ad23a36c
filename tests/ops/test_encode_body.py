"""TurboQuantEncode's body against the numpy reference, in both runtimes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.rows import assert_same_rows
from tests.ops.site import INT3, Site
from tests.singleop import RUNTIMES, codec_of, run_ort, run_reference_evaluator
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import KINDS

DTYPES = [ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("bits", [(2, 3), (3, 5), (4, 4), (5, 2)])
def test_every_pair_of_codecs(runtime: str, bits: tuple[int, int], rng: Any) -> None:
    site = Site(codec_of(bits[0]), codec_of(bits[1]), head_size=64)
    feeds = site.feeds(rng, past_length=(5, 2), new=3)
    _, *presents = RUNTIMES[runtime](site.model(), feeds)
    assert_same_rows(site, feeds, presents, site.expected(feeds)[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_correction", [0, 1])
def test_element_types_and_norm_correction(
    dtype: ir.DataType, norm_correction: int, rng: Any
) -> None:
    site = Site(dtype=dtype, norm_correction=norm_correction, key=INT3, head_size=128)
    feeds = site.feeds(rng, past_length=(4,), new=4, batch=2)
    _, *presents = run_ort(site.model(), feeds)
    assert_same_rows(site, feeds, presents, site.expected(feeds)[1:])


@pytest.mark.parametrize(
    ("past_length", "capacity", "new", "slots"),
    [
        ((0,), 0, 1, 1),
        ((0,), 0, 5, 5),
        ((7,), 7, 1, 8),
        ((3,), 9, 2, 9),
        ((8,), 9, 3, 11),
        ((2, 6, 0), 6, 2, 8),
        ((2, 6, 0), 12, 2, 12),
    ],
)
def test_rows_go_to_their_slots_and_nowhere_else(
    *,
    past_length: tuple[int, ...],
    capacity: int,
    new: int,
    slots: int,
    rng: Any,
) -> None:
    site = Site()
    feeds = site.feeds(rng, past_length=past_length, capacity=capacity, new=new)
    _, *presents = run_ort(site.model(), feeds)
    assert presents[0].shape[2] == slots
    assert_same_rows(site, feeds, presents, site.expected(feeds)[1:])
    for b, length in enumerate(past_length):
        kept = [s for s in range(capacity) if not length <= s < length + new]
        np.testing.assert_array_equal(presents[1][b, :, kept], feeds["past_value"][b, :, kept])
        beyond = [s for s in range(capacity, slots) if not length <= s < length + new]
        assert not presents[1][b][:, beyond].any()


def test_one_past_length_serves_all_sequences(rng: Any) -> None:
    site = Site()
    feeds = site.feeds(rng, past_length=(3,), new=2, batch=3)
    each = feeds | {"past_length": np.array([3, 3, 3])}
    for one, other in zip(run_ort(site.model(), feeds), run_ort(site.model(), each), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, 2e19])
def test_a_row_of_no_finite_norm_is_the_zero_vector(bad: float, rng: Any) -> None:
    site = Site()
    feeds = site.feeds(rng, new=3)
    spoilt = {name: feeds[name].copy() for name in ("key", "value")}
    for rows in spoilt.values():
        rows[0, 1, 1, 5] = bad
    attended, *presents = run_ort(site.model(), feeds | spoilt)
    zeroed = {name: feeds[name].copy() for name in ("key", "value")}
    for rows in zeroed.values():
        rows[0, 1, 1] = 0
    wanted = run_ort(site.model(), feeds | zeroed)
    for present, other in zip(presents, wanted[1:], strict=True):
        np.testing.assert_array_equal(present, other)
        assert not present[0, 1, 1, -2:].any()
    np.testing.assert_array_equal(attended, wanted[0])


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
def test_no_optimisation_level_changes_a_byte(level: str, rng: Any) -> None:
    site = Site(value=INT3, dtype=ir.DataType.FLOAT16)
    feeds = site.feeds(rng, past_length=(2, 4), new=3)
    _, *presents = run_ort(site.model(), feeds, getattr(onnxruntime.GraphOptimizationLevel, level))
    assert_same_rows(site, feeds, presents, site.expected(feeds)[1:])


def test_chunks_give_the_bytes_of_one_piece(rng: Any) -> None:
    site = Site(value=INT3)
    feeds = site.feeds(rng, new=9)
    _, *whole = run_ort(site.model(), feeds)
    caches = [feeds["past_key"], feeds["past_value"]]
    done = 0
    for size in (4, 1, 3, 1):
        part = {name: feeds[name][:, :, done : done + size] for name in ("query", "key", "value")}
        part |= {"past_key": caches[0], "past_value": caches[1]}
        part["past_length"] = np.array([done])
        _, *caches = run_ort(site.model(), part)
        done += size
    for one, other in zip(whole, caches, strict=True):
        np.testing.assert_array_equal(one, other)


@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.sampled_from(KINDS[LLOYD_MAX].bits),
    head_size=st.sampled_from([8, 16, 24, 64, 80]),
    exponent=st.integers(-30, 30),
)
@settings(max_examples=40)
def test_any_magnitude(seed: int, bits: int, head_size: int, exponent: int) -> None:
    site = Site(codec_of(bits), codec_of(bits), head_size=head_size)
    feeds = site.feeds(np.random.default_rng(seed), past_length=(1,), new=2)
    feeds["key"] = np.ldexp(feeds["key"], exponent).astype(np.float32)
    _, *presents = run_reference_evaluator(site.model(), feeds)
    assert_same_rows(site, feeds, presents, site.expected(feeds)[1:])
