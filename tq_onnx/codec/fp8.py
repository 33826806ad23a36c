"""Floats to and from E4M3FN, eight bits without infinities (OCP 8-bit floating point, 2023).

A code is sign, four bits of exponent (bias 7), three of mantissa. The values of one binade are a
step of ``2^(max(e, 1) - 10)`` apart, e being the exponent field, and::

    code = round(|x| / step) + 8 * max(e - 1, 0)

for x of that binade, which carries into the next exponent by itself. Encoding rounds to nearest,
ties to even, and saturates. The two codes that the format has for NaN are never written; rows that
nobody wrote may hold them, and they are read as 0.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

FP8_MAX: Final = 448.0
"""The largest finite E4M3FN."""

_MANTISSA: Final = 8
_EXPONENTS: Final = 16
_SIGN: Final = 0x80
_LOWEST_EXPONENT: Final = -6
"""Of a normal number."""


def _magnitudes() -> npt.NDArray[np.float32]:
    exponent, mantissa = np.divmod(np.arange(_EXPONENTS * _MANTISSA), _MANTISSA)
    step = 2.0 ** (np.maximum(exponent, 1) - 10)
    values = (mantissa + np.where(exponent > 0, _MANTISSA, 0)) * step
    values[-1] = 0.0  # NaN
    return values.astype(np.float32)


VALUES: Final[npt.NDArray[np.float32]] = np.concatenate([_magnitudes(), -_magnitudes()])
"""The number of each of the 256 codes, float32."""
VALUES.setflags(write=False)


def encode(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """Return the codes of finite floats ``[...]``: uint8 ``[...]``."""
    x = np.asarray(values, np.float64)
    magnitude = np.minimum(np.abs(x), FP8_MAX)
    _, above = np.frexp(magnitude)  # magnitude < 2^above
    # frexp gives zero the exponent 0.
    exponent = np.where(magnitude > 0, np.maximum(above - 1, _LOWEST_EXPONENT), _LOWEST_EXPONENT)
    numbers = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int64)
    codes = numbers + _MANTISSA * (exponent - _LOWEST_EXPONENT)
    signed: npt.NDArray[np.uint8] = (codes | np.where(np.signbit(x), _SIGN, 0)).astype(np.uint8)
    return signed
