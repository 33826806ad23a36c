"""The kernel of rotary embedding, run in the shim, against float64: to 1e-5, float16 to a rounding.

See ``test_kernels.py`` for what the shim is. No run may have a hazard; what a kernel does not write
is NaN before and after.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest

from simulated_kernels import ARCHITECTURES, KERNELS, TILING_OF, Kernels

HALF_STEP = 2.0**-11
"""Relative error of rounding to float16."""
HALF_SMALLEST = 2.0**-25
"""Absolute error of rounding to a subnormal float16."""

both_types = pytest.mark.parametrize("dtype", ["float32", "float16"])
both_sizes = pytest.mark.parametrize("size", [64, 128])
every_kind_of_cores = pytest.mark.parametrize("cores", [1, 2, 40])


def _check(kernels: Kernels, output: np.ndarray, expected: np.ndarray) -> None:
    assert not kernels.hazards, kernels.messages()
    error = np.abs(output.astype(np.float64) - expected)
    if output.dtype == np.float16:
        error = np.maximum(error - HALF_STEP * np.abs(expected) - HALF_SMALLEST, 0)
    assert error.max() <= 1e-5 * max(1, np.abs(expected).max())


def _rotate(
    kernels: Kernels,
    x: np.ndarray,
    position: int,
    *,
    first: int = 0,
    count: int | None = None,
    spare: int = 0,
    cores: int = 3,
) -> None:
    """The table ends ``spare`` rows behind the last position."""
    count = x.shape[1] - first if count is None else count
    angles = np.random.default_rng(2).uniform(-4, 4, (position + count + spare, x.shape[2] // 2))
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    output = kernels.rotary_embedding(x, tables, position, first=first, count=count, cores=cores)
    tokens = slice(first, first + count)
    one, other = np.split(x[:, tokens].astype(np.float64), 2, axis=2)
    cosines, sines = (table[position : position + count].astype(np.float64) for table in tables)
    halves = one * cosines - other * sines, other * cosines + one * sines
    _check(kernels, output[:, tokens], np.concatenate(halves, axis=2))
    assert np.isnan(output[:, :first]).all()
    assert np.isnan(output[:, first + count :]).all()


def _random(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


@both_sizes
@both_types
@pytest.mark.parametrize("heads", [1, 3, 16, 130])
def test_rotary_embedding_of_a_token(kernels: Kernels, size: int, dtype: str, heads: int) -> None:
    for position in (0, 57):
        _rotate(kernels, _random(heads, 1, size, dtype=dtype), position)


@both_sizes
@both_types
@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 65])
def test_rotary_embedding_of_a_prompt(kernels: Kernels, size: int, dtype: str, tokens: int) -> None:
    for heads in (1, 6, 17):
        _rotate(kernels, _random(heads, tokens, size, dtype=dtype), 3, spare=1)


@both_sizes
@both_types
@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 20), (7, 16), (13, 20), (32, 1)])
def test_rotary_embedding_of_a_run_leaves_other_tokens(
    kernels: Kernels, size: int, dtype: str, first: int, count: int
) -> None:
    for heads in (2, 21):
        x = _random(heads, 33, size, dtype=dtype)
        _rotate(kernels, x, 11, first=first, count=count, spare=2)


@every_kind_of_cores
def test_rotary_embedding_on_any_number_of_cores(kernels: Kernels, cores: int) -> None:
    for heads, tokens in ((16, 1), (9, 3), (5, 50)):
        _rotate(kernels, _random(heads, tokens, 128), 4, cores=cores)


def test_an_instruction_takes_many_rows(kernels: Kernels) -> None:
    kernels.reset()
    _rotate(kernels, _random(64, 1, 128), 0, cores=1)
    assert kernels.vector_instructions == 6


def test_the_build_with_cann_and_the_simulator_have_every_kernel(kernels: Kernels) -> None:
    sources = sorted(path.name for path in KERNELS.glob("tq_*.cpp"))
    library = (KERNELS / "library.cpp").read_text(encoding="utf-8")
    assert sorted(re.findall(r"tq_\w+\.cpp", library)) == sources
    texts = [(KERNELS / name).read_text(encoding="utf-8") for name in sources]
    entries = re.findall(
        r"__global__ __vector__ __aicore__ void (\w+)\((\w+) \w+\)", "".join(texts)
    )
    assert dict(entries) == TILING_OF
    assert all(kernels.has(f"tq_launch_{name}") for name in TILING_OF)


def test_no_kernel_uses_what_the_vector_unit_of_2002_has_not() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob("*.[hc]*")))
    for name in ("int4b_t", "LoadDataWithTranspose", "Fixpipe", "ShiftRight", "ShiftLeft"):
        assert name not in texts


@pytest.mark.cann
@pytest.mark.parametrize("arch", ARCHITECTURES)
class TestEverySize:
    """Rows, widths, tokens and heads one by one, in buffers that fit either architecture."""

    @pytest.fixture
    def every(self, libraries: Mapping[int, Kernels], arch: int) -> Kernels:
        libraries[arch].reset()
        return libraries[arch]

    @both_types
    @both_sizes
    def test_rotary_embedding(self, every: Kernels, dtype: str, size: int) -> None:
        for tokens in range(1, 70):
            x = _random(tokens % 5 + 1, tokens, size, dtype=dtype)
            _rotate(every, x, tokens % 3)
            first = tokens // 3
            _rotate(every, x, 5, first=first, count=(tokens - first) // 2 + 1, spare=1)
        for heads in range(1, 140):
            _rotate(every, _random(heads, heads % 7 + 1, size, dtype=dtype), 1, cores=heads % 4 + 1)
        assert every.ub_bytes <= 192 * 1024
