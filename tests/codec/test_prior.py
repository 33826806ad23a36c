"""Covariances of few tokens: what is added to them, and what that is worth."""

from __future__ import annotations

import numpy as np
import pytest

from tq_onnx.codec.prior import rank, with_prior

N, D = 2, 32


def covariance(vectors: np.ndarray) -> np.ndarray:
    return (vectors.swapaxes(-1, -2) @ vectors / vectors.shape[-2]).astype(np.float32)


def vectors(tokens: int, seed: int = 0) -> np.ndarray:
    scale = np.geomspace(4, 0.25, D)
    return np.random.default_rng(seed).standard_normal((N, tokens, D)) * scale


@pytest.mark.parametrize("tokens", [D // 2, 4 * D, 16384])
def test_it_weighs_as_much_as_a_token_for_each_coordinate(tokens: int) -> None:
    given = covariance(vectors(tokens))
    found = with_prior(given, tokens)
    mean = np.trace(given, axis1=1, axis2=2)[:, None, None] / D
    wanted = (tokens * given + D * mean * np.eye(D)) / (tokens + D)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        np.trace(found, axis1=1, axis2=2), np.trace(given, axis1=1, axis2=2), rtol=1e-6
    )


def test_padding_stays_zero() -> None:
    given = vectors(500)
    given[..., D // 2 :] = 0
    found = with_prior(covariance(given), 500)
    assert not found[:, D // 2 :].any()
    assert not found[..., D // 2 :].any()
    assert (np.diagonal(found, axis1=1, axis2=2)[:, : D // 2] > 0).all()
    assert rank(covariance(given)) == (D // 2, D // 2)
    assert not with_prior(np.zeros((N, D, D)), 500).any()


def test_the_rank_is_that_of_the_head_that_lacks_most() -> None:
    given = vectors(500)
    assert rank(covariance(given)) == (D, D)
    given[1, 7:] = 0
    assert rank(covariance(given)) == (7, D)
