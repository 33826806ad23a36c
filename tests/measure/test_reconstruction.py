"""Errors of rows against theory, and against what their steps allow."""

from __future__ import annotations

import numpy as np
import pytest

from tq_onnx.codec import reference
from tq_onnx.codec.rotated import PROD
from tq_onnx.codec.spec import CODECS, Codec
from tq_onnx.codec.unrotated import RAW, UNIFORM
from tq_onnx.measure.reconstruction import largest_error, theory

D = 80
STEPPED = [codec for codec in CODECS if not (codec.is_rotated or codec.is_raw)]


@pytest.mark.parametrize("codec", STEPPED, ids=str)
def test_no_row_errs_by_more_than_its_steps_allow(codec: Codec) -> None:
    x = np.random.default_rng(1).standard_normal((2000, D)) * 2.0 ** np.arange(-3, 5)[
        :, None
    ].repeat(250, axis=0)
    decoded = reference.decode(
        reference.encode(x, codec, None, None), codec, None, None, head_size=D
    )
    shares = ((x - decoded) ** 2).sum(axis=-1) / largest_error(x, codec)
    assert shares.max() <= 1
    assert shares.mean() > 0.1
    worse = decoded + 2 * (decoded - x)
    assert (((x - worse) ** 2).sum(axis=-1) / largest_error(x, codec)).max() > 1


def test_what_theory_says() -> None:
    assert theory(Codec(UNIFORM, 4), D, True) is None
    assert theory(Codec(RAW, 16), D, True) == 0
    # One bit less, and the residual estimated without bias: pi / 2 of what it was.
    three = theory(Codec("lloyd_max", 3), D, False)
    found = theory(Codec(PROD, 4), D, False)
    assert three is not None and found is not None
    assert found == pytest.approx(three * (np.pi / 2 + 1 / D), rel=0.03)
