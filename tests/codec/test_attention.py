"""Attention of the oracle: its masks, its special rows, and the rotated space (identity 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq_onnx.codec import reference
from tq_onnx.codec.bitpack import unpack
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.presets import QR
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import Codec, row_layout

D, SCALE = 64, 0.125
KEY, VALUE = Codec(LLOYD_MAX, 4), Codec(LLOYD_MAX, 3)
ROTATION = make_rotation(QR, D, 0)
CODECS: dict[str, Any] = {
    "key": KEY,
    "value": VALUE,
    "key_rotation": ROTATION,
    "value_rotation": ROTATION,
    "key_codebook": lloyd_max(4, D).centroids,
    "value_codebook": lloyd_max(3, D).centroids,
}


def case(batch: int, heads: int, groups: int, new: int, slots: int, *, seed: int = 0) -> Any:
    random = np.random.RandomState(seed)
    query = random.standard_normal((batch, heads, new, D))
    kv = random.standard_normal((2, batch, heads // groups, slots, D))
    keys = reference.encode(kv[0], KEY, ROTATION, lloyd_max(4, D))
    values = reference.encode(kv[1], VALUE, ROTATION, lloyd_max(3, D))
    return query, keys, values


def run(query: np.ndarray, keys: np.ndarray, values: np.ndarray, past: Any, **more: Any) -> Any:
    options: dict[str, Any] = {"scale": SCALE, "causal": True} | more
    return reference.attention(query, keys, values, np.array(past), **CODECS, **options)


def decoded(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (
        reference.decode(keys, KEY, ROTATION, lloyd_max(4, D)),
        reference.decode(values, VALUE, ROTATION, lloyd_max(3, D)),
    )


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    groups=st.sampled_from([1, 2, 4]),
    new=st.integers(1, 5),
    past=st.integers(0, 6),
)
def test_equals_the_rotated_space(seed: int, groups: int, new: int, past: int) -> None:
    # Identity 2: rotate the query once, un-rotate the output once, touch no key and no value.
    query, keys, values = case(1, 4, groups, new, past + new, seed=seed)
    rotated = query @ ROTATION.astype(float)
    k = lloyd_max(4, D).centroids.astype(float)[unpack(keys, row_layout(KEY, D))]
    v = lloyd_max(3, D).centroids.astype(float)[unpack(values, row_layout(VALUE, D))]
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    s_k = np.repeat(reference.scales_of(keys, KEY, D), groups, axis=1)[:, :, None]
    s_v = np.repeat(reference.scales_of(values, VALUE, D), groups, axis=1)[:, :, None]
    scores = SCALE * rotated @ k.swapaxes(-1, -2) * s_k
    scores += np.triu(np.full((new, past + new), -np.inf), past + 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = (weights * s_v) @ v @ ROTATION.T.astype(float)
    # The rotation itself is orthogonal only to float32 rounding.
    np.testing.assert_allclose(run(query, keys, values, [past]), expected, atol=5e-6)


def test_one_key_gives_its_value() -> None:
    query, keys, values = case(1, 2, 1, 1, 1)
    np.testing.assert_allclose(run(query, keys, values, [0]), decoded(keys, values)[1], atol=1e-12)


def test_causal_sees_no_future() -> None:
    query, keys, values = case(1, 2, 2, 3, 5)
    full = run(query, keys, values, [2])
    for t in range(3):
        alone = run(query[:, :, t : t + 1], keys, values, [2 + t])
        np.testing.assert_allclose(full[:, :, t : t + 1], alone, atol=1e-12)
    bidirectional = run(query, keys, values, [2], causal=False)
    np.testing.assert_allclose(bidirectional[:, :, -1], full[:, :, -1], atol=1e-12)
    assert np.abs(bidirectional[:, :, 0] - full[:, :, 0]).max() > 1e-2


def test_slots_behind_the_last_token_do_not_exist() -> None:
    query, keys, values = case(1, 2, 1, 2, 8)
    before = run(query, keys, values, [3], causal=False)
    keys[:, :, 5:], values[:, :, 5:] = 0xFF, 0xFF
    assert np.array_equal(run(query, keys, values, [3], causal=False), before)


def test_sequences_have_lengths_of_their_own() -> None:
    query, keys, values = case(2, 2, 1, 2, 9)
    both = run(query, keys, values, [6, 1], causal=False)
    for b, past in enumerate((6, 1)):
        one = slice(b, b + 1)
        alone = run(query[one], keys[one], values[one], [past], causal=False)
        np.testing.assert_allclose(both[one], alone, atol=1e-12)


@pytest.mark.parametrize("window", [1, 2, 4, 100])
def test_sliding_window_counts_the_own_key(window: int) -> None:
    query, keys, values = case(1, 2, 1, 1, 7)
    first = max(0, 7 - window)
    cut = run(query, keys[:, :, first:], values[:, :, first:], [6 - first])
    np.testing.assert_allclose(
        run(query, keys, values, [6], sliding_window=window), cut, atol=1e-12
    )


def test_softcap_bounds_the_scores() -> None:
    query, keys, values = case(1, 1, 1, 1, 6)
    k, v = decoded(keys, values)
    scores = 2.0 * np.tanh(SCALE * k[0, 0] @ query[0, 0, 0] * 100 / 2.0)
    weights = np.exp(scores) / np.exp(scores).sum()
    output = run(query * 100, keys, values, [5], softcap=2.0)
    np.testing.assert_allclose(output[0, 0, 0], weights @ v[0, 0], atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "hiding"),
    [
        (np.float32, [-np.inf, np.finfo(np.float32).min, -1.8e38]),
        (np.float16, [-np.inf, -65504.0, -40000.0]),
    ],
)
def test_bias_hides_completely(dtype: type, hiding: list[float]) -> None:
    query, keys, values = case(1, 2, 1, 2, 5)
    values[:, :, 0, -2:] = [0x00, 0x7E]  # a NaN scale
    keys[:, :, 0, -2:] = [0x00, 0x7E]
    bias = np.zeros((1, 1, 1, 5), dtype)
    for value in hiding:
        bias[..., 0] = value
        output = run(query, keys, values, [3], attention_bias=bias)
        cut = run(query, keys[:, :, 1:], values[:, :, 1:], [2])
        np.testing.assert_allclose(output, cut, atol=1e-12)
    bias[..., 0] = -1e4
    assert np.isnan(run(query, keys, values, [3], attention_bias=bias)).all()


def test_bias_is_added_and_broadcast() -> None:
    query, keys, values = case(2, 2, 1, 3, 5)
    bias = np.random.RandomState(1).standard_normal((2, 2, 3, 5)).astype(np.float32)
    full = run(query, keys, values, [2], attention_bias=bias)
    longer = np.concatenate([bias, np.full((2, 2, 3, 4), np.nan, np.float32)], axis=-1)
    assert np.array_equal(run(query, keys, values, [2], attention_bias=longer), full)
    row = bias[:1, :1, :1]
    spread = np.broadcast_to(row, (2, 2, 3, 5)).copy()
    assert np.array_equal(
        run(query, keys, values, [2], attention_bias=row),
        run(query, keys, values, [2], attention_bias=spread),
    )
    constant = np.full((1, 1, 1, 1), 3.0, np.float32)
    np.testing.assert_allclose(
        run(query, keys, values, [2], attention_bias=constant),
        run(query, keys, values, [2]),
        atol=1e-12,
    )


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    query, keys, values = case(1, 2, 1, 2, 4)
    bias = np.zeros((1, 1, 2, 4), np.float32)
    bias[:, :, 0] = -np.inf
    output = run(query, keys, values, [2], attention_bias=bias)
    assert not output[:, :, 0].any()
    assert output[:, :, 1].any()


def test_a_sink_widens_the_denominator_of_its_head() -> None:
    query, keys, values = case(1, 2, 2, 3, 5)
    k, v = decoded(keys, values)
    sinks = np.array([0.7, -1.3])
    output = run(query * 20, keys, values, [2], softcap=2.0, head_sink=sinks, causal=False)
    for h, t in np.ndindex(2, 3):
        # Neither scaled nor capped: exp(sink) beside the exponentials of finished scores.
        exponentials = np.exp(2.0 * np.tanh(SCALE * k[0, 0] @ query[0, h, t] * 20 / 2.0))
        expected = exponentials @ v[0, 0] / (exponentials.sum() + np.exp(sinks[h]))
        np.testing.assert_allclose(output[0, h, t], expected, atol=1e-12)


def test_a_sink_of_minus_infinity_is_none() -> None:
    query, keys, values = case(2, 2, 1, 3, 5)
    none = np.full(2, -np.inf, np.float16)
    plain = run(query, keys, values, [2])
    assert np.array_equal(run(query, keys, values, [2], head_sink=none), plain)
    zero = run(query, keys, values, [2], head_sink=np.zeros(2))
    assert (np.abs(zero) < np.abs(plain)).all()


def test_a_sink_far_above_or_below_all_scores_overflows_nothing() -> None:
    query, keys, values = case(1, 2, 1, 2, 5)
    plain = run(query, keys, values, [3])
    output = run(query, keys, values, [3], head_sink=np.array([6e4, -6e4]))
    assert not output[:, 0].any()
    np.testing.assert_allclose(output[:, 1], plain[:, 1], atol=1e-12)


def test_a_query_that_sees_nothing_but_its_sink_gives_zeros() -> None:
    query, keys, values = case(1, 2, 1, 2, 4)
    bias = np.zeros((1, 1, 2, 4), np.float32)
    bias[:, :, 0] = -np.inf
    output = run(query, keys, values, [2], attention_bias=bias, head_sink=np.zeros(2))
    assert not output[:, :, 0].any()
    assert output[:, :, 1].any()


def test_a_bad_query_spoils_only_itself() -> None:
    query, keys, values = case(1, 2, 1, 3, 4)
    clean = run(query, keys, values, [1])
    query[0, 1, 1, 7] = np.nan
    output = run(query, keys, values, [1])
    assert np.isnan(output[0, 1, 1]).all()
    output[0, 1, 1] = clean[0, 1, 1]
    assert np.array_equal(output, clean)


def test_cache_too_short() -> None:
    query, keys, values = case(1, 2, 1, 2, 4)
    with pytest.raises(ValueError, match="4 rows is too short for 5"):
        run(query, keys, values, [3])
