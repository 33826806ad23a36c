"""The four identities that the implementation lives on (SPEC, section 1)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.codec.theory import plain_error
from tests.codec.vectors import KINDS, PRODS, decode, encode, relative_error, tables, unit_vectors
from tq_onnx.codec import reference
from tq_onnx.codec.bitpack import unpack
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.presets import HADAMARD
from tq_onnx.codec.quantise import coordinates
from tq_onnx.codec.rotated import LLOYD_MAX, U8
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import Codec, row_layout


def test_identity_1_the_norm_is_folded_into_the_scale() -> None:
    # gamma yhat / ||yhat|| R^T, computed with a norm, is what decode gives without one.
    x = unit_vectors(50, 64) * np.geomspace(0.01, 100, 50)[:, None]
    for codec in (codec for codec in KINDS if codec.kind == LLOYD_MAX):
        rotation, book = tables(codec, 64)
        assert rotation is not None and book is not None
        gamma = np.linalg.norm(x, axis=-1, keepdims=True)
        y = x / gamma @ rotation.astype(float)
        yhat = book.centroids.astype(float)[np.searchsorted(book.boundaries, y, side="right")]
        formula = gamma * yhat / np.linalg.norm(yhat, axis=-1, keepdims=True) @ rotation.T
        decoded = decode(encode(x, codec), codec, 64)
        errors = np.linalg.norm(decoded - formula, axis=-1) / gamma[:, 0]
        assert (errors <= 2.0**-11).all()


def attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """Causal attention of one head, in float64: ``[T, D]`` each."""
    scores = np.tril(np.ones((len(queries), len(keys))))
    scores = np.where(scores > 0, scale * queries @ keys.T, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ values


@pytest.mark.parametrize("codec", [Codec(LLOYD_MAX, 3), Codec(U8, 4), *PRODS], ids=str)
def test_identity_2_attention_runs_in_the_rotated_space(codec: Codec) -> None:
    # The query is rotated once, the output un-rotated once; no key or value is.
    queries, keys, values = (unit_vectors(9, 64, seed) * 6 for seed in range(3))
    rotation, _ = tables(codec, 64)
    assert rotation is not None
    cached = [encode(x, codec) for x in (keys, values)]
    # A row's coordinates are what it decodes to under the identity.
    seen = [coordinates_of(rows, codec) for rows in cached]
    turn = rotation.astype(float)
    rotated = attend(queries @ turn, *seen, 0.125) @ turn.T
    plain = attend(queries, *(decode(rows, codec, 64) for rows in cached), 0.125)
    np.testing.assert_allclose(rotated, plain, atol=1e-12)
    own = attention(queries, *cached, codec)
    np.testing.assert_allclose(own, plain, atol=1e-12)


def coordinates_of(rows: np.ndarray, codec: Codec) -> np.ndarray:
    """What rows mean in the space that the rotation leads to: ``[..., C]``."""
    layout = row_layout(codec, 64)
    _, book = tables(codec, 64)
    assert book is not None
    return coordinates(
        unpack(rows, layout), reference.fields_of(rows, layout), codec, book.centroids
    )


def attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    codec: Codec,
    offsets: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """The oracle's causal attention of one head over rows ``[T, W]``."""
    rotation, book = tables(codec, queries.shape[-1])
    centroids = None if book is None else book.centroids
    key_offset, value_offset = (None, None) if offsets is None else offsets
    return reference.attention(
        queries[None, None],
        keys[None, None],
        values[None, None],
        np.array([0]),
        key=codec,
        value=codec,
        key_rotation=rotation,
        key_codebook=centroids,
        value_rotation=rotation,
        value_codebook=centroids,
        scale=0.125,
        causal=True,
        key_offset=key_offset,
        value_offset=value_offset,
    )[0, 0]


@pytest.mark.parametrize("first_rows", ["zeros", "means"])
@pytest.mark.parametrize("codec", [Codec(LLOYD_MAX, 4), Codec("uniform", 4)], ids=str)
def test_identity_3_a_constant_offset_is_free(codec: Codec, first_rows: str) -> None:
    # Keys and values around a large mean, but for the first rows, which lie elsewhere (sinks).
    random = np.random.RandomState(5)
    mean = random.standard_normal((2, 64)) * 4
    sinks = random.standard_normal((2, 4, 64)) * (3 if first_rows == "means" else 0.5)
    queries, keys, values = random.standard_normal((3, 20, 64))
    keys, values = (
        np.concatenate([sinks[side], mean[side] + spread[4:]])
        for side, spread in enumerate((keys, values))
    )
    offsets = [
        np.concatenate([sinks[side] * (first_rows == "means"), mean[side : side + 1]]).astype(
            np.float32
        )[:, None]
        for side in range(2)
    ]
    slots = reference.offset_rows(offsets[0], np.array([0]), 1, 20)[0, 0]
    assert np.array_equal(slots[5:], np.repeat(slots[4:5], 15, axis=0))
    rows = [
        encode(x - reference.offset_rows(offset, np.array([0]), 1, 20)[0, 0], codec)
        for x, offset in zip((keys, values), offsets, strict=True)
    ]
    centred = attention(queries, *rows, codec, (offsets[0], offsets[1]))
    # As the specification words it, for rows that a softmax cannot tell from uncentred ones: to
    # centred scores nothing is added, the uncentred rows get - q.mu_K, and mu_V comes back weighted
    # by the attention on centred rows.
    k, v = (decode(x, codec, 64) for x in rows)
    mu_k, mu_v = (offset.astype(float)[:, 0] for offset in offsets)
    at = np.minimum(np.arange(20), 4)
    scores = 0.125 * (queries @ k.T + queries @ (mu_k[at] - mu_k[4]).T)
    scores = np.where(np.tril(np.ones((20, 20))) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(centred, weights @ (v + mu_v[at]), atol=1e-10)
    # And it is worth it: closer to the truth than without.
    truth = attend(queries, keys, values, 0.125)
    plain = attention(queries, encode(keys, codec), encode(values, codec), codec)
    assert np.linalg.norm(centred - truth) < 0.7 * np.linalg.norm(plain - truth)


@pytest.mark.parametrize("first", [0, 1_000_000])
def test_identity_3_a_mean_that_turns_is_free_at_any_position(first: int) -> None:
    random = np.random.RandomState(6)
    mean = random.standard_normal(64) * 3
    frequencies = np.tile(_ANGLES, 2).astype(np.float32)
    turned = rope(np.tile(mean, (40, 1)), first, frequencies[:32].astype(np.float64))
    a, b = np.split(mean, 2)
    offset = np.stack([mean, np.concatenate([-b, a])])[:, None].astype(np.float32)
    past, more = np.array([first]), {"frequencies": frequencies}
    found = reference.offset_rows(offset, past, 1, 40, **more)[0, 0]
    np.testing.assert_allclose(found, turned, atol=2e-6)
    # Padding on the left moves positions; its own slots are at position 0.
    more["left_padding"] = np.array([3])
    padded = reference.offset_rows(offset, past, 1, 43, **more)[0, 0]
    np.testing.assert_array_equal(padded[3:], found)
    if not first:
        np.testing.assert_array_equal(padded[:3], np.repeat(offset[0], 3, axis=0))


_ANGLES = 10_000.0 ** (-np.arange(32) / 32)


def rope(x: np.ndarray, first: int = 0, frequencies: np.ndarray = _ANGLES) -> np.ndarray:
    """Rotary embedding of rows at positions first, ...: pairs (i, i + D/2) turn by one angle."""
    half = x.shape[-1] // 2
    angles = (first + np.arange(len(x)))[:, None] * frequencies
    a, b = x[:, :half], x[:, half:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1
    )


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight


def test_identity_4_equalisation_is_free() -> None:
    # Scales that are one per RoPE pair move from the keys' norm weight to the queries'.
    random = np.random.RandomState(7)
    query, key = random.standard_normal((2, 300, 64))
    q_weight = np.exp(random.standard_normal(64) * 0.3)
    k_weight = np.exp(random.standard_normal(64) * 0.3)
    k_weight[[3, 20, 35]] *= 30  # outlier channels
    energy = ((k_weight**2)[:32] + (k_weight**2)[32:]) / ((q_weight**2)[:32] + (q_weight**2)[32:])
    s = np.tile(energy**0.25, 2)
    before = (rope(normed(query, q_weight)), rope(normed(key, k_weight)))
    after = (rope(normed(query, q_weight * s)), rope(normed(key, k_weight / s)))
    scores = before[0] @ before[1].T
    np.testing.assert_allclose(after[0] @ after[1].T, scores, rtol=1e-10, atol=1e-9)
    # One scale per channel would not pass the rotary embedding.
    broken = np.exp(random.standard_normal(64) * 0.3)
    other = rope(normed(query, q_weight * broken)) @ rope(normed(key, k_weight / broken)).T
    assert np.abs(other - scores).max() > 1
    # Noise in a score is |q|^2 |k|^2 times the codec's: predicted and measured.
    codec = Codec(LLOYD_MAX, 4)

    def noise(q: np.ndarray, k: np.ndarray) -> float:
        return float(np.mean((q @ (decode(encode(k, codec), codec, 64) - k).T) ** 2))

    gain = noise(*before) / noise(*after)

    def level(q: np.ndarray, k: np.ndarray) -> float:
        return float(np.mean(np.sum(q**2, -1)) * np.mean(np.sum(k**2, -1)))

    assert gain > 3
    assert gain == pytest.approx(level(*before) / level(*after), rel=0.15)
    # The spec's closed form, from the norm weights alone.
    pair_q, pair_k = (np.sqrt((w**2)[:32] + (w**2)[32:]) for w in (q_weight, k_weight))
    predicted = np.sum(pair_q**2) * np.sum(pair_k**2) / np.sum(pair_q * pair_k) ** 2
    assert gain == pytest.approx(predicted, rel=0.15)


def test_a_plain_hadamard_fails_on_constant_vectors() -> None:
    # Why ours has random signs: without them a constant part ends up in one coordinate.
    signed = make_rotation(HADAMARD, 128, 0).astype(float)
    plain = signed * np.sign(signed[:, :1])
    x = 1 + 0.1 * unit_vectors(200, 128) * np.sqrt(128)
    codec, book = Codec(LLOYD_MAX, 4), lloyd_max(4, 128)
    decoded = [
        reference.decode(reference.encode(x, codec, turn, book, False), codec, turn, book)
        for turn in (plain.astype(np.float32), signed.astype(np.float32))
    ]
    errors = [relative_error(x, found) for found in decoded]
    assert errors[0] > 0.3
    assert errors[1] == pytest.approx(plain_error(4, 128), rel=0.5)
