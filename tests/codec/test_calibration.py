"""Statistics against plain numpy on all tokens at once, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq_onnx.codec.calibration import LARGEST_SCALE, Calibration, LayerStatistics
from tq_onnx.codec.gathering import FEWEST_TOKENS, Gathering
from tq_onnx.codec.rotaryangles import STILL, Measurement, Pairing, Rotary
from tq_onnx.errors import UnsupportedModelError, UsageError

P, H, N, D = 5, 4, 2, 6
FACTS = {"tokens": 1, "context": 1, "tool_version": "1", "text_digest": "0" * 64}
Array = np.ndarray
SIZES = 2.0 ** np.array([[3, 2, 1, 0, -1, -2], [0, 3, -2, 2, -3, 1]])


@dataclass
class Window:
    q: Array
    k: Array
    v: Array


def window(rng: np.random.Generator, tokens: int) -> Window:
    """Channels far from zero, of unlike sizes; the first tokens elsewhere."""
    k = SIZES[:, None] * (rng.standard_normal((N, tokens, D)) + 3)
    v = rng.standard_normal((N, tokens, D)) - 1
    k[:, :2] += 20
    return Window(rng.standard_normal((H, tokens, D)) * np.arange(1, D + 1), k, v)


UNKNOWN = Measurement(None, 0.5)
PAIRS = Pairing("interleaved", 0, 4)
TURNS = Rotary(np.float32([0.5, 0.5, 0.01, 0.01, 0, 0]), PAIRS, "the test")


def gather(
    windows: list[Window],
    chunk: int = 100,
    positions: int = P,
    measured: Measurement | None = None,
) -> Calibration:
    """Keys stand still where nothing is measured, and have the very mean of those behind the 4."""
    gathering = Gathering(1, positions, [measured or UNKNOWN])
    for each in windows:
        for start in range(0, each.k.shape[1], chunk):
            part = slice(start, start + chunk)
            k = each.k[:, part]
            gathering.count(start, k.shape[1])
            gathering.add(0, start, each.q[:, part], k, each.v[:, part])
    found = gathering.result(**FACTS)
    if measured is not None:
        return found
    return replace(found, layers=tuple(standing(layer, found.counts) for layer in found.layers))


def standing(layer: LayerStatistics, counts: Array) -> LayerStatistics:
    mean = np.average(
        layer.k_mean[4:] if len(counts) > 4 else layer.k_mean[-1:],
        axis=0,
        weights=counts[4:] if len(counts) > 4 else None,
    )
    turned = np.stack([mean, np.zeros_like(mean)])
    return replace(layer, pairing=STILL, k_turned_mean=turned)


def turned_window(rng: np.random.Generator, tokens: int, start: int = 0) -> Window:
    """Keys about a mean that turns with their positions, and queries that turn."""
    one = window(rng, tokens)
    backwards = Rotary(-TURNS.frequencies, PAIRS, "")
    return Window(backwards.unturned(one.q, start), backwards.unturned(one.k, start), one.v)


def at(windows: list[Window], name: str, start: int, stop: int | None) -> Array:
    """Vectors of positions start to stop of all windows, ``[N, tokens, D]``."""
    return np.concatenate([getattr(each, name)[:, start:stop] for each in windows], axis=1)


def score_noise(q: Array, k: Array, scales: Array | None = None) -> Array:
    """What a rotated codec's noise in a score is proportional to, for each KV head."""
    if scales is not None:
        q, k = q * np.repeat(scales, H // N, axis=0)[:, None], k / scales[:, None]
    return (q**2).mean(1).sum(-1).reshape(N, -1).sum(1) * (k**2).mean(1).sum(-1)


LENGTHS = [40, 40, 3, 17]


@pytest.fixture(scope="module")
def windows() -> list[Window]:
    rng = np.random.default_rng(0)
    first = window(rng, 40)
    return [first, *(window(rng, length) for length in LENGTHS[1:])]


@pytest.mark.parametrize("chunk", [1, 2, 4, 7, 100])
def test_statistics_are_means_by_position(windows: list[Window], chunk: int) -> None:
    found = gather(windows, chunk)
    assert found.counts.tolist() == [4, 4, 4, 3, sum(max(length - 4, 0) for length in LENGTHS)]
    (layer,) = found.layers
    assert (layer.num_heads, layer.kv_num_heads, layer.head_size) == (H, N, D)
    for row in range(P):
        stop = None if row == P - 1 else row + 1
        for name, mean, energy in (
            ("k", layer.k_mean, layer.k_energy),
            ("v", layer.v_mean, layer.v_energy),
        ):
            vectors = at(windows, name, row, stop)
            np.testing.assert_allclose(mean[row], vectors.mean(1), rtol=1e-12)
            np.testing.assert_allclose(energy[row], (vectors**2).mean(1), rtol=1e-12)
    queries = at(windows, "q", 0, None)
    np.testing.assert_allclose(layer.q_energy, (queries**2).mean(1), rtol=1e-12)
    assert layer.query_covariance.dtype == np.float32
    for head, covariance in enumerate(layer.query_covariance):
        group = queries[head * H // N : (head + 1) * H // N]
        wanted = np.mean([np.outer(row, row) for each in group for row in each], axis=0)
        np.testing.assert_allclose(covariance, wanted, rtol=1e-6, atol=1e-6)


def test_half_precision_is_summed_wide() -> None:
    one = Window(*(np.full((n, 900, D), 300, np.float16) for n in (H, N, N)))
    (layer,) = gather([one]).layers
    assert (layer.k_energy == 90000).all()
    assert (layer.q_energy == 90000).all()
    assert (layer.query_covariance == 90000).all()


def test_positions_that_no_window_reaches_are_left_out() -> None:
    rng = np.random.default_rng(1)
    found = gather([window(rng, 8) for _ in range(20)], positions=17)
    assert found.counts.tolist() == [20] * 8
    assert found.longest_center_from == 7
    with pytest.raises(UsageError, match="`center_from=8` is not between 0 and 7"):
        found.check_center_from(8)
    with pytest.raises(UsageError, match="`center_from=-1` "):
        found.offsets(0, -1)
    assert found.offsets(0, 7)[0].shape == (8, N, D)


def test_too_few_tokens() -> None:
    rng = np.random.default_rng(1)
    with pytest.raises(UsageError, match=f"{FEWEST_TOKENS - 1} tokens are too few"):
        gather([window(rng, FEWEST_TOKENS - 1)])
    gather([window(rng, FEWEST_TOKENS)])
    with pytest.raises(UsageError, match="0 tokens"):
        gather([])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize(("name", "what"), [("q", "queries"), ("k", "keys"), ("v", "values")])
def test_overflow_is_refused(name: str, what: str, bad: float) -> None:
    one = window(np.random.default_rng(1), 99)
    getattr(one, name)[1, 7, 3] = bad
    with pytest.raises(UnsupportedModelError, match=f"the {what} of layer 0 overflow"):
        gather([one])


@pytest.mark.parametrize("center", [0, 1, 3, 4])
def test_offsets_are_means(windows: list[Window], center: int) -> None:
    found = gather(windows)
    key, value = found.offsets(0, center)
    for offset, name in ((key, "k"), (value, "v")):
        assert offset.shape == (center + 1, N, D)
        assert offset.dtype == np.float32
        assert offset.flags.c_contiguous
        for row in range(center):
            own = at(windows, name, row, row + 1).mean(1)
            np.testing.assert_allclose(offset[row], own, rtol=1e-6)
        # The mean of keys, before they turn, is that of tokens behind the first 4.
        later = at(windows, name, 4 if name == "k" else center, None).mean(1)
        np.testing.assert_allclose(offset[center], later, rtol=1e-6)


def test_offsets_of_scaled_keys(windows: list[Window]) -> None:
    found = gather(windows)
    scales = found.scales(0)
    plain, scaled = found.offsets(0), found.offsets(0, key_scale=scales)
    np.testing.assert_allclose(scaled[0] * scales, plain[0], rtol=1e-6)
    np.testing.assert_array_equal(scaled[1], plain[1])


def turning(found: Calibration, scale: Array | None = None) -> tuple[Array, Array]:
    offset, frequencies = found.offsets(0, key_scale=scale)[0], found.frequencies(0)
    assert (offset.shape, offset.dtype) == ((2 + 4 if frequencies.any() else 5, N, D), np.float32)
    assert (frequencies.shape, frequencies.dtype) == ((D,), np.float32)
    return offset, frequencies


@pytest.mark.parametrize("chunk", [3, 100])
def test_keys_that_turn_have_means_that_turn(chunk: int) -> None:
    rng = np.random.default_rng(7)
    windows = [turned_window(rng, length) for length in (900, 300, 3)]
    found = gather(windows, chunk, measured=Measurement(TURNS, 0.0))
    (layer,) = found.layers
    assert not found.turns_unknown
    assert layer.angles == "the test"
    still = [TURNS.unturned(each.k, 0)[:, 4:] for each in windows]
    keys = np.concatenate(still, axis=1)
    mean = keys.mean(1)
    np.testing.assert_allclose(layer.k_turned_mean[0], mean, rtol=1e-10)
    offset, frequencies = turning(found)
    far = turned_window(np.random.default_rng(8), 400, start=100_000).k
    phases = np.arange(100_000, 100_400)[:, None] * frequencies.astype(np.float64)
    far = far - offset[0][:, None] * np.cos(phases) - offset[1][:, None] * np.sin(phases)
    # What is left is as large as it was near the beginning, and as it is said to be.
    left = TURNS.averaged((far[:, 2:] ** 2).mean(1))
    (means, deviations), _ = found.moments(0, 4)
    np.testing.assert_array_equal(means, layer.k_turned_mean[0])
    np.testing.assert_allclose(deviations**2, TURNS.averaged(keys.var(1)), rtol=1e-10)
    np.testing.assert_allclose(left, deviations**2, rtol=0.25)
    scales = found.scales(0)
    for table in (deviations, scales):  # both members of a pair are alike
        np.testing.assert_array_equal(table[:, [0, 2]], table[:, [1, 3]])
    np.testing.assert_allclose(turning(found, scales)[0] * scales, offset, rtol=1e-6)
    np.testing.assert_array_equal(frequencies, TURNS.frequencies)
    for position in range(4):  # the first have means of their own
        phases = position * frequencies.astype(np.float64)
        turned = offset[0] * np.cos(phases) + offset[1] * np.sin(phases)
        own = np.mean([each.k[:, position] for each in windows if each.k.shape[1] > position], 0)
        np.testing.assert_allclose(turned + offset[2 + position], own, atol=1e-5)
        # Where the target cannot turn, these are all that there is.
        np.testing.assert_allclose(found.offsets(0, turns=False)[0][position], own, atol=1e-5)
    assert not found.offsets(0, turns=False)[0][4].any()


def test_covariances_of_queries_hold_at_any_length() -> None:
    rng = np.random.default_rng(7)
    windows = [turned_window(rng, 500)]
    for each in windows:  # all coordinates of a query are alike, before they turn
        each.q[:] = Rotary(-TURNS.frequencies, PAIRS, "").unturned(np.ones((H, 500, D)), 0)
    found = gather(windows, measured=Measurement(TURNS, 0.0))
    covariance = found.query_covariance(0)[0]
    np.testing.assert_allclose(covariance, covariance.T, atol=1e-12)
    np.testing.assert_allclose(covariance.diagonal(), 1, rtol=0.02)
    assert np.linalg.eigvalsh(covariance).min() > 0
    assert covariance[4, 5] > 0.99  # neither turns
    assert abs(covariance[0, 1]) < 0.01  # the average over the phase of a pair


def test_keys_that_turn_nobody_knows_how_are_not_centered() -> None:
    rng = np.random.default_rng(7)
    found = gather([turned_window(rng, 300)], measured=UNKNOWN)
    assert found.turns_unknown == (
        "the keys of layer 0 are not centered: 50% of keys of one token repeated differ by more "
        "than an angle"
    )
    for array in turning(found):
        assert not array.any()
    # What they are like is told all the same.
    np.testing.assert_array_equal(found.moments(0, 4)[0][0], found.layers[0].k_mean[4])


@pytest.mark.parametrize("center", [None, 4])
def test_scales_are_those_of_the_definition(windows: list[Window], center: int | None) -> None:
    scales = gather(windows).scales(0, center)
    keys = at(windows, "k", center or 0, None)
    if center is not None:
        keys = keys - keys.mean(1, keepdims=True)
    energy = (at(windows, "q", 0, None) ** 2).mean(1).reshape(N, -1, D).mean(1)
    wanted = ((keys**2).mean(1) / energy) ** 0.25
    wanted /= np.exp(np.log(wanted).mean(-1, keepdims=True))
    assert scales.shape == (N, D)
    assert scales.dtype == np.float32
    np.testing.assert_allclose(scales, wanted, rtol=1e-6)


def test_scales_keep_scores_and_lessen_noise(windows: list[Window]) -> None:
    found = gather(windows)
    scales = found.scales(0)
    queries, keys = at(windows, "q", 0, None), at(windows, "k", 4, None)
    keys = keys - keys.mean(1, keepdims=True)
    group = np.repeat(keys, H // N, axis=0)
    each = np.repeat(scales, H // N, axis=0)[:, None]
    plain = np.einsum("hqd,hkd->hqk", queries, group)
    scaled = np.einsum("hqd,hkd->hqk", queries * each, group / each)
    np.testing.assert_allclose(scaled, plain, rtol=1e-5, atol=1e-5 * np.abs(plain).max())
    before, after = score_noise(queries, keys), score_noise(queries, keys, scales)
    assert (after < 0.7 * before).all()
    # No neighbour of them is better: each of these would be, if they were off by a tenth.
    for channel in range(D):
        for factor in (0.9, 1.1):
            other = scales.copy()
            other[:, channel] *= factor
            assert (score_noise(queries, keys, other) > 1.0001 * after).all()


def statistics(k_energy: Array, q_energy: Array, k_mean: Array | None = None) -> Calibration:
    mean = np.zeros_like(k_energy) if k_mean is None else k_mean
    heads, size = k_energy.shape[1:]
    layer = LayerStatistics(
        *(mean, k_energy, mean, k_energy, q_energy),
        query_covariance=np.zeros((heads, size, size), np.float32),
        frequencies=np.zeros(size, np.float32),
        k_turned_mean=np.stack([mean[-1], np.zeros_like(mean[-1])]),
        pairing=STILL,
    )
    return Calibration((layer,), np.array([1] * len(k_energy)), 2, 2, "1", "")


@given(st.integers(0, 2**32 - 1), st.floats(-18, 18))
def test_scales_are_positive_and_bounded(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    energies = 10.0 ** (spread * rng.standard_normal((2, 2, 1, 8)).clip(-1.9, 1.9))
    k, q = energies
    k[:, 0, rng.integers(0, 8)] = 0
    q[0, 0, rng.integers(0, 8)] = 0
    scales = statistics(k, q[0]).scales(0, None)
    assert (scales > 0).all()
    assert np.isfinite(scales).all()
    assert scales.max() / scales.min() <= LARGEST_SCALE**2 * 1.001
    np.testing.assert_allclose(np.log(scales.astype(float)).mean(-1), 0, atol=1e-6)


def test_dead_channels_are_left_alone() -> None:
    k = np.array([[[4.0, 0, 64, 1]]]).repeat(2, 0)
    q = np.array([[4.0, 1, 4, 0]])
    # Ratios 1 and 16, fourth roots 1 and 2, geometric mean sqrt(2).
    wanted = [[0.5**0.5, 1, 2**0.5, 1]]
    np.testing.assert_allclose(statistics(k, q).scales(0, None), wanted, rtol=1e-6)
    nothing = statistics(np.zeros((2, 1, 4)), q).scales(0, 1)
    np.testing.assert_array_equal(nothing, np.ones((1, 4)))


def test_nearly_dead_channels_do_not_spoil_the_others() -> None:
    k = np.array([1, 16, 1, 16, 1, 1e-30, 1e-30, 1e-30])
    found = statistics(k[None, None].repeat(2, 0), np.ones((1, 8))).scales(0, None)[0]
    np.testing.assert_allclose(found[[1, 3]] / found[0], 2, rtol=1e-5)
    np.testing.assert_allclose(found[0] / found[5:], LARGEST_SCALE, rtol=1e-5)


def test_a_constant_channel_is_not_mistaken_for_noise() -> None:
    """Variance is a difference of float32 numbers: what is left of a constant is their rounding."""
    mean = np.float32([[[300.1, 0, 0, 0]]]).repeat(2, 0).astype(np.float64)
    wide = np.float32([[[300.1**2, 1, 1, 1]]]).repeat(2, 0).astype(np.float64)
    for nudge in (-1e-2, 0, 1e-2):
        energy = wide + np.array([nudge, 0, 0, 0])
        scales = statistics(energy, np.ones((1, 4)), mean).scales(0, 1)[0]
        # 1e-6 of 9e4 is 0.09, whose fourth root is 0.55: the same three times.
        assert scales[0] / scales[1] == pytest.approx(0.0900600**0.25, rel=1e-3)


def test_whose_statistics_they_are() -> None:
    rng = np.random.default_rng(2)
    found = gather([window(rng, 99)])
    (own,) = found.layers
    found.check_matches([own])
    with pytest.raises(UsageError, match="1 layers, and the model has 2"):
        found.check_matches([own, own])
    other = replace(own, q_energy=np.ones((2 * H, D)))
    two = replace(found, layers=(own, own))
    with pytest.raises(UsageError) as caught:
        two.check_matches([own, other])
    assert str(caught.value) == (
        "the calibration file is of a model with 4 query heads and 2 key/value heads of size 6 in "
        "layer 1, and the model has 8 query heads and 2 key/value heads of size 6; calibrate the "
        "very model that you convert"
    )
