"""The encoder that searches: the best gain, error feedback, scales, and who may differ."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.codec.clear import is_clear
from tests.codec.vectors import relative_error, tables, unit_vectors
from tq_onnx.codec import reference
from tq_onnx.codec.acceptance import judge_rows
from tq_onnx.codec.feedback import DAMPING, feedback_of
from tq_onnx.codec.kind import NORM_KEPT, UNBIASED, Tables
from tq_onnx.codec.quantise import quantise, tables_of
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.search import MAX_GAINS, Search, gain_table
from tq_onnx.codec.spec import KINDS, Codec

INT4 = Codec(LLOYD_MAX, 4)
CODECS = [Codec(LLOYD_MAX, bits) for bits in KINDS[LLOYD_MAX].bits]
GAINS = gain_table()
HEADS, TOKENS, SIZE = 2, 40, 40


def covariance(size: int = SIZE, heads: int = HEADS) -> np.ndarray:
    """Second moments of queries that are strong in a few directions."""
    rng = np.random.default_rng(7)
    queries = rng.standard_normal((heads, 500, size)) * np.geomspace(4, 0.1, size)
    turned = queries @ np.linalg.qr(rng.standard_normal((size, size)))[0]
    moments: np.ndarray = turned.swapaxes(-1, -2) @ turned / 500
    return moments


def feedback(codec: Codec = INT4) -> np.ndarray:
    rotation, _ = tables(codec, SIZE)
    assert rotation is not None
    return feedback_of(covariance(), rotation)


def keys(seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((HEADS, TOKENS, SIZE))


def tables_with(codec: Codec, given: np.ndarray | None = None) -> Tables:
    return tables_of(codec, *tables(codec, SIZE), UNBIASED, gains=GAINS, feedback=given)


def rows_with(x: np.ndarray, codec: Codec, given: Tables) -> np.ndarray:
    how = {"gains": given.gains, "feedback": given.feedback}
    return reference.encode(x, codec, *tables(codec, SIZE), given.norm_correction, **how)


def error_of(x: np.ndarray, codec: Codec, gains: np.ndarray | None, correction: int) -> float:
    turn, book = tables(codec, x.shape[-1])
    rows = reference.encode(x, codec, turn, book, correction, gains=gains)
    return relative_error(x, reference.decode(rows, codec, turn, book))


def test_gains_are_in_the_order_of_preference() -> None:
    assert gain_table(1).tolist() == [1]
    assert len(GAINS) == MAX_GAINS
    assert np.all(np.diff(np.abs(GAINS.astype(float) - 1)) >= 0)
    assert sorted(GAINS)[0] == np.float32(0.7)
    assert sorted(GAINS)[-1] == np.float32(1.5)
    for count in (0, MAX_GAINS + 1):
        with pytest.raises(ValueError, match=f"no table of {count} gains"):
            gain_table(count)


def test_error_of_random_vectors_at_four_bits() -> None:
    x = unit_vectors(3_000, 128)
    assert error_of(x, INT4, GAINS, UNBIASED) <= 0.0080
    assert error_of(x, INT4, GAINS, NORM_KEPT) <= 0.0080
    assert 0.0091 < error_of(x, INT4, None, NORM_KEPT) < 0.0094
    assert error_of(x, INT4, gain_table(1), NORM_KEPT) == error_of(x, INT4, None, NORM_KEPT)


@pytest.mark.parametrize(("bits", "share"), [(2, 0.995), (3, 0.96), (5, 0.83)])
def test_other_bits_gain_too(bits: int, share: float) -> None:
    x, codec = unit_vectors(4_000, 128), Codec(LLOYD_MAX, bits)
    assert error_of(x, codec, GAINS, NORM_KEPT) < share * error_of(x, codec, None, NORM_KEPT)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_best_gain_leaves_the_least_error(codec: Codec) -> None:
    x = keys()[0]
    turn, book = tables(codec, SIZE)
    assert turn is not None
    assert book is not None
    found = quantise(x, codec, turn, book, gains=GAINS)[0]
    for row, codes in zip(x @ turn.astype(float), found, strict=True):
        u = row / np.linalg.norm(row)
        errors = []
        for gain in GAINS.astype(float):
            own = np.array([sum(gain * a >= t for t in book.boundaries.astype(float)) for a in u])
            c = book.centroids.astype(float)[own]
            fit = np.linalg.lstsq(c[:, None], u, rcond=None)[0][0]
            errors.append((np.sum((u - fit * c) ** 2), own.tolist()))
        assert codes.tolist() == min(errors, key=lambda pair: pair[0])[1]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_unbiased_scales_keep_the_product_with_the_vector(codec: Codec) -> None:
    x = keys()
    decoded = reference.decode(rows_with(x, codec, tables_with(codec)), codec, *tables(codec, SIZE))
    np.testing.assert_allclose((x * decoded).sum(-1), (x * x).sum(-1), rtol=6e-4)


def test_feedback_is_the_formulas() -> None:
    codec, size = Codec(LLOYD_MAX, 3), 8
    turn, book = tables(codec, size)
    assert turn is not None
    assert book is not None
    matrix = feedback_of(covariance(size, 1), turn)
    lower = np.eye(size)
    for j in range(size - 1):
        step = np.abs(matrix[0, j + 1 :, j]).max() / np.float32(127)
        lower[j + 1 :, j] = np.rint(matrix[0, j + 1 :, j] / step).astype(float) * step
    moments = lower @ np.diag(np.diagonal(matrix[0]).astype(float)) @ lower.T
    x = np.random.default_rng(1).standard_normal((1, 30, size))
    found = quantise(x, codec, turn, book, UNBIASED, gains=GAINS, feedback=matrix)
    c, t = book.centroids.astype(float), book.boundaries.astype(float)
    for row, codes, scale in zip(x[0], found[0][0], found[1]["scale"][0], strict=True):
        u = row / np.linalg.norm(row) @ turn.astype(float)
        best = (-1.0, codes, 0.0)
        for gain in GAINS.astype(float):
            e, own = np.zeros(size), np.zeros(size, int)
            for j in range(size - 1, -1, -1):
                a = u[j] - sum(lower[i, j] * e[i] for i in range(j + 1, size))
                own[j] = np.sum(gain * a >= t)
                e[j] = c[own[j]] / gain - u[j]
            along = u @ moments @ c[own]
            worth = max(along, 0) ** 2 / (c[own] @ moments @ c[own])
            if worth > best[0]:
                best = worth, own, np.linalg.norm(row) * (u @ moments @ u) / along
        assert codes.tolist() == best[1].tolist()
        assert scale[0] == pytest.approx(best[2], rel=6e-4)


def test_feedback_of_queries_that_are_all_alike_changes_nothing() -> None:
    codec, x = INT4, keys()
    turn, _ = tables(codec, SIZE)
    assert turn is not None
    even = feedback_of(np.tile(3 * np.eye(SIZE), (HEADS, 1, 1)), np.eye(SIZE))
    assert np.array_equal(
        rows_with(x, codec, tables_with(codec)), rows_with(x, codec, tables_with(codec, even))
    )
    assert np.array_equal(
        feedback_of(np.zeros((1, SIZE, SIZE)), turn)[0], np.eye(SIZE, dtype=np.float32)
    )


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_feedback_makes_scores_better(codec: Codec) -> None:
    x = keys()
    turn, book = tables(codec, SIZE)
    lost = []
    for given in (None, feedback(codec)):
        rows = rows_with(x, codec, tables_with(codec, given))
        errors = x - reference.decode(rows, codec, turn, book)
        lost.append(float(np.einsum("nti,nij,ntj->", errors, covariance(), errors)))
    assert lost[1] < 0.8 * lost[0]


def test_feedback_holds_the_second_moments() -> None:
    turn, _ = tables(INT4, SIZE)
    assert turn is not None
    scales = np.random.default_rng(2).uniform(0.5, 2, (HEADS, SIZE))
    made = feedback_of(covariance(), turn, scales).astype(float)
    lower = np.tril(made, -1) + np.eye(SIZE)
    weights = np.diagonal(made, axis1=-2, axis2=-1)[:, None, :]
    wanted = turn.T @ (scales[:, :, None] * covariance() * scales[:, None, :]) @ turn
    wanted = wanted / (np.trace(wanted, axis1=-2, axis2=-1)[:, None, None] / SIZE)
    wanted = wanted + DAMPING * np.eye(SIZE)
    np.testing.assert_allclose((lower * weights) @ lower.swapaxes(-1, -2), wanted, atol=2e-6)
    assert not np.triu(made, 1).any()
    for moments in (np.diag([*[1.0] * (SIZE - 1), -1.0]), np.full((SIZE, SIZE), np.nan)):
        with pytest.raises(ValueError, match="covariance of the queries"):
            feedback_of(moments[None], turn)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_vectors_that_are_none_are_stored_as_zero(codec: Codec) -> None:
    x = keys()
    x[0, 0], x[0, 1, 3], x[1, 2, 0] = 0, np.nan, np.inf
    decoded = reference.decode(
        rows_with(x, codec, tables_with(codec, feedback(codec))), codec, *tables(codec, SIZE)
    )
    for head, token in ((0, 0), (0, 1), (1, 2)):
        assert not decoded[head, token].any()
    assert decoded[0, 2].any()


def test_codes_that_say_nothing_have_no_scale() -> None:
    book = tables(INT4, SIZE)[1]
    assert book is not None
    search = Search(-book.centroids, book.boundaries, GAINS)
    y = unit_vectors(3, SIZE)
    codes = search.attempts(y).best
    assert not search.worth(y, codes).any()
    assert not search.scale(y, codes, UNBIASED).any()


# Who may differ


@pytest.mark.parametrize(("codec", "feeds"), [*product(CODECS, (False, True))], ids=str)
def test_rows_of_the_reference_pass(codec: Codec, feeds: bool) -> None:
    x, how = keys(), tables_with(codec, feedback(codec) if feeds else None)
    found = judge_rows(rows_with(x, codec, how), x, codec, how)
    assert (found.differing, found.wrong, found.steps) == (0, 0, 0)


@pytest.mark.parametrize("feeds", [False, True])
def test_codes_of_a_worse_gain_are_wrong(feeds: bool) -> None:
    x, how = keys(), tables_with(INT4, feedback() if feeds else None)
    other = Tables(how.rotation, how.centroids, how.boundaries, UNBIASED, GAINS[:1], how.feedback)
    rows = rows_with(x, INT4, other)
    assert judge_rows(rows, x, INT4, other).wrong == 0
    assert judge_rows(rows, x, INT4, how).wrong > HEADS * TOKENS // 2


def test_codes_without_the_feedback_are_wrong() -> None:
    x, how = keys(), tables_with(INT4, feedback())
    rows = rows_with(x, INT4, tables_with(INT4))
    assert judge_rows(rows, x, INT4, how).wrong > x.size // 20


@pytest.mark.parametrize("feeds", [False, True])
def test_every_wrong_bit_is_seen(feeds: bool) -> None:
    x, how = keys(), tables_with(INT4, feedback() if feeds else None)
    for bit in range(8):
        rows = rows_with(x, INT4, how)
        rows[1, 5, 3] ^= 1 << bit
        assert judge_rows(rows, x, INT4, how).wrong >= 1
    rows = rows_with(x, INT4, how)
    rows[1, 5, -2] ^= 4
    assert judge_rows(rows, x, INT4, how).steps >= 2


def test_a_tie_excuses_a_row() -> None:
    y = unit_vectors(200, SIZE)
    book = tables(INT4, SIZE)[1]
    assert book is not None
    how = Tables(np.eye(SIZE, dtype=np.float32), book.centroids, book.boundaries, UNBIASED, GAINS)
    gain = GAINS[Search(book.centroids, book.boundaries, GAINS).attempts(y).chosen].astype(float)
    y[:, 0] = float(book.boundaries[9]) / gain
    y[:, 1:] *= (np.sqrt(1 - y[:, 0] ** 2) / np.linalg.norm(y[:, 1:], axis=-1))[:, None]
    clear = is_clear(y, INT4, how)
    nudged = y * (1 + 1e-8 * np.random.default_rng(5).standard_normal(y.shape))
    rows = reference.encode(nudged, INT4, how.rotation, book, UNBIASED, gains=GAINS)
    found = judge_rows(rows, y, INT4, how)
    assert found.differing > 20
    assert found.wrong == 0
    assert judge_rows(rows[clear], y[clear], INT4, how).differing == 0
    assert judge_rows(rows, y * (1 + 1e-5 * (np.arange(SIZE) == 0)), INT4, how).wrong > 20
