"""The angles by which keys turn, from keys of one token repeated; and what follows from them."""

from __future__ import annotations

import numpy as np
import pytest

from tq_onnx.codec.rotaryangles import (
    STILL,
    Measurement,
    Pairing,
    Rotary,
    measure_rotary,
    useful_mean,
)

TEXTS, HEADS, POSITIONS = 3, 2, 256
Array = np.ndarray


def powers(base: float, pairs: int) -> Array:
    """As models compute them, in float32."""
    return np.float32(1) / np.float32(base) ** (np.arange(pairs, dtype=np.float32) / pairs)


def scaled(frequencies: Array) -> Array:
    """Like Llama 3: slow pairs are eight times as slow, and some are in between."""
    pairs = len(frequencies)
    factors = np.interp(np.arange(pairs), [pairs / 3, pairs / 2], [1, 8])
    return (frequencies / factors).astype(np.float32)


def rotary(pairing: Pairing, frequencies: Array, head_size: int) -> Rotary:
    full = np.zeros(head_size, np.float32)
    for members in pairing.pairs:
        full[members] = frequencies
    return Rotary(full, pairing, "the test")


def turned(
    pairing: Pairing,
    frequencies: Array,
    head_size: int,
    noise: float = 0.0,
    length: int = POSITIONS,
) -> Array:
    """Keys ``[texts, N, T, D]`` in float32, some of whose coordinates are nearly dead."""
    rng = np.random.default_rng(head_size)
    keys = rng.standard_normal((TEXTS, HEADS, 1, head_size))
    keys = keys * np.exp(rng.standard_normal((1, HEADS, 1, head_size)))
    first, second = pairing.pairs
    still = keys[..., first] + 1j * keys[..., second]
    moving = still * np.exp(1j * np.arange(length)[:, None] * np.float64(frequencies))
    found = np.repeat(keys, length, axis=2)
    found[..., first], found[..., second] = moving.real, moving.imag
    found += noise * rng.standard_normal(found.shape)
    return found.astype(np.float32)


PAIRINGS = {
    "halves": (64, Pairing("halves", 0, 64)),
    "interleaved": (64, Pairing("interleaved", 0, 64)),
    "partial": (128, Pairing("halves", 0, 32)),
    "partial interleaved": (64, Pairing("interleaved", 0, 32)),
    "the last coordinates": (96, Pairing("halves", 64, 32)),
    "one pair": (16, Pairing("interleaved", 0, 2)),
}


@pytest.mark.parametrize("name", PAIRINGS)
@pytest.mark.parametrize("noise", [0, 1e-3])
def test_powers_of_a_base_are_found_exactly(name: str, noise: float) -> None:
    size, pairing = PAIRINGS[name]
    frequencies = powers(5e5, pairing.size // 2)
    for sign in (1, -1):
        found = measure_rotary(turned(pairing, sign * frequencies, size, noise)).rotary
        assert found is not None
        assert found.pairing == pairing
        wanted = rotary(pairing, sign * frequencies, size).frequencies
        if pairing.size > 2:
            np.testing.assert_allclose(found.frequencies, wanted, rtol=2e-7)
            assert found.source == "powers of the base 500000"
        else:  # two numbers tell no base
            np.testing.assert_allclose(found.frequencies, wanted, rtol=1e-6)


@pytest.mark.parametrize("name", PAIRINGS)
def test_other_angles_are_measured(name: str) -> None:
    size, pairing = PAIRINGS[name]
    frequencies = scaled(powers(5e5, pairing.size // 2)) * np.float32(0.9)
    if name == "halves":
        frequencies[[3, 20]] = 0.0  # pairs that do not turn
    found = measure_rotary(turned(pairing, frequencies, size)).rotary
    assert found is not None
    wanted = rotary(pairing, frequencies, size).frequencies
    np.testing.assert_allclose(found.frequencies, wanted, atol=1e-7)
    # The same numbers in the graph are taken as they are, and others are not.
    others = [powers(1e4, pairing.size // 2), np.ones(3), np.full(size, np.nan)]
    exact = measure_rotary(turned(pairing, frequencies, size), [*others, frequencies]).rotary
    assert exact is not None
    assert exact.source == "a table of the graph"
    np.testing.assert_array_equal(exact.frequencies, wanted)
    twice = np.concatenate([frequencies, frequencies])
    again = measure_rotary(turned(pairing, frequencies, size), [twice]).rotary
    assert again is not None
    np.testing.assert_array_equal(again.frequencies, wanted)


def test_divided_frequencies_are_found() -> None:
    size, pairing = PAIRINGS["halves"]
    found = measure_rotary(turned(pairing, powers(1e6, 32) / 8, size)).rotary
    assert found is not None
    assert found.source == "powers of the base 1000000 divided by 8"
    np.testing.assert_allclose(found.frequencies[:32], powers(1e6, 32) / 8, rtol=2e-7)


def test_few_positions_tell_enough() -> None:
    size, pairing = PAIRINGS["halves"]
    found = measure_rotary(turned(pairing, powers(1e4, 32), size, length=6)).rotary
    assert found is not None
    np.testing.assert_allclose(found.frequencies[:32], powers(1e4, 32), rtol=2e-7)


def test_keys_that_do_not_turn() -> None:
    still = np.repeat(turned(STILL, np.zeros(0), 32)[:, :, :1], 50, axis=2)
    for keys, source in (
        (still, "keys that do not turn"),
        (np.zeros_like(still), "keys that are zero"),
    ):
        found = measure_rotary(keys)
        assert found.rotary is not None
        assert (found.rotary.pairing, found.rotary.source) == (STILL, source)
        assert not found.rotary.frequencies.any()


def test_keys_that_change_otherwise() -> None:
    """Learned positions, and states of recurrent layers, which forget the beginning."""
    size, pairing = PAIRINGS["halves"]
    keys = turned(pairing, powers(1e4, 32), size)
    learned = np.random.default_rng(1).standard_normal((POSITIONS, size)).astype(np.float32)
    found = measure_rotary(keys[:, :, :1] + learned)
    assert found.rotary is None
    assert "differ by more than an angle" in found.reason
    other = turned(pairing, powers(1e4, 32), size)[::-1]
    share = (np.arange(POSITIONS) / POSITIONS)[:, None].astype(np.float32)
    assert measure_rotary(share * keys + (1 - share) * other).rotary is None
    keys[0, 0, 0, 0] = np.nan
    assert measure_rotary(keys).rotary is None
    unknown = Measurement(None, float("nan"))
    assert unknown.reason == "the graph takes no text of two tokens and more"


def test_sinks_of_heads_hide_no_angle() -> None:
    """They take less from values the more tokens there are, which changes keys in length."""
    size, pairing = PAIRINGS["halves"]
    keys = turned(pairing, powers(1e4, 32), size)
    keys *= (1 - 0.8 / np.sqrt(np.arange(1, POSITIONS + 1)))[:, None].astype(np.float32)
    found = measure_rotary(keys).rotary
    assert found is not None
    np.testing.assert_allclose(found.frequencies[:32], powers(1e4, 32), rtol=2e-7)


def test_turning_and_its_inverse() -> None:
    size, pairing = PAIRINGS["partial interleaved"]
    how = rotary(pairing, scaled(powers(1e4, 16)), size)
    keys = turned(pairing, scaled(powers(1e4, 16)), size).astype(np.float64)
    first = keys[:, :, :1]
    np.testing.assert_allclose(
        how.unturned(keys[:, :, 7:], 7), first + 0 * keys[:, :, 7:], atol=1e-5
    )
    cosine, sine = how.turned_mean(first[0, :, 0])
    phases = np.arange(POSITIONS)[:, None] * how.frequencies.astype(np.float64)
    mean = cosine[:, None] * np.cos(phases) + sine[:, None] * np.sin(phases)
    np.testing.assert_allclose(mean, keys[0], atol=1e-5)
    energies = how.averaged(keys**2)
    np.testing.assert_allclose(energies, energies[:, :, :1] + 0 * energies, rtol=1e-5)
    draws = np.random.default_rng(0).standard_normal((1, 99, size))
    covariance = draws.swapaxes(1, 2) @ draws
    # Turned back by p is turned by -p: the mean over both signs of all positions is the same.
    back = [how.unturned(draws.swapaxes(0, 1), position).swapaxes(0, 1) for position in range(50)]
    wanted = np.mean([each.swapaxes(1, 2) @ each for each in back], axis=0)
    backwards = Rotary(-how.frequencies, how.pairing, "")
    np.testing.assert_allclose(
        backwards.turned_covariance(covariance, np.arange(50.0)), wanted, atol=1e-9
    )


def test_means_that_do_no_good_are_left_out() -> None:
    size, pairing = PAIRINGS["halves"]
    how = rotary(pairing, powers(1e4, 32), size)
    mean, energy = np.ones((HEADS, size)), np.full((HEADS, size), 2.0)
    np.testing.assert_array_equal(useful_mean(how, mean, energy, 1000), mean)
    assert not useful_mean(how, mean, energy, 10).any()  # chance
    first, second = pairing.pairs
    small = mean.copy()
    for members in (first[:3], second[:3]):  # of fast pairs, next to nothing
        small[:, members] = 0.2
    kept = useful_mean(how, small, energy, 100_000)
    assert not kept[:, [*first[:3], *second[:3]]].any()
    np.testing.assert_array_equal(kept[:, first[3:]], mean[:, first[3:]])
    for members in (first[0], second[0]):  # the fastest has a mean, and so those behind it stay
        small[:, members] = 1.0
    np.testing.assert_array_equal(useful_mean(how, small, energy, 100_000), small)


@pytest.mark.parametrize(
    ("frequencies", "pairing", "reason"),
    [
        (np.zeros(15), STILL, "not one angle for each"),
        (np.full(16, np.nan), STILL, "beyond half a turn"),
        (np.full(16, 4.0), Pairing("halves", 0, 16), "beyond half a turn"),
        (np.zeros(16), Pairing("halves", 2, 16), "that the head does not have"),
        (np.ones(16), Pairing("halves", 0, 14), "of coordinates that are no pairs"),
        (np.arange(16) / 9, Pairing("halves", 0, 16), "of coordinates that are no pairs"),
    ],
)
def test_what_is_refused(frequencies: Array, pairing: Pairing, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Rotary(frequencies.astype(np.float32), pairing, "").check(16)


@pytest.mark.parametrize(
    "entry",
    [
        {"layout": "thirds", "start": 0, "size": 2},
        {"layout": "halves", "start": -1, "size": 2},
        {"layout": "halves", "start": 0, "size": 3},
        {"layout": "halves", "start": 0, "size": True},
        {"layout": "halves", "start": 0.0, "size": 2},
        {"layout": [], "start": 0, "size": 2},
        {"layout": "halves", "start": 0},
        [],
    ],
)
def test_pairings_that_are_none(entry: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        Pairing.read(entry)
    pairing = Pairing("interleaved", 2, 8)
    assert Pairing.read(pairing.document) == pairing
