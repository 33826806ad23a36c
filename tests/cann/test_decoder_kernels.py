"""The other kernels of a decoder, run in the shim, against float64: to 1e-5, float16 to a rounding.

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


def _normalise(
    kernels: Kernels,
    x: np.ndarray,
    *,
    epsilon: float = 1e-6,
    cores: int = 3,
) -> None:
    scale = np.random.default_rng(1).standard_normal(x.shape[1]).astype(x.dtype)
    output = kernels.rms_normalization(x, scale, epsilon=epsilon, cores=cores)
    exact = x.astype(np.float64)
    roots = np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + epsilon)
    _check(kernels, output, exact / roots * scale)


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


def _swish(kernels: Kernels, x: np.ndarray, cores: int = 3) -> None:
    exact = x.astype(np.float64)
    _check(kernels, kernels.swish(x, cores=cores), exact / (1 + np.exp(-exact)))


def _transpose(kernels: Kernels, shape: tuple[int, int, int, int], cores: int = 3) -> None:
    x = np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)
    output = kernels.transpose(x, cores=cores)
    assert not kernels.hazards, kernels.messages()
    assert np.array_equal(output, x.transpose(0, 2, 1, 3))


def _random(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


@both_types
@pytest.mark.parametrize("width", [16, 48, 64, 80, 128, 192, 256, 1024])
@pytest.mark.parametrize("rows", [1, 5, 131])
def test_norms_of_narrow_rows(kernels: Kernels, dtype: str, width: int, rows: int) -> None:
    _normalise(kernels, _random(rows, width, dtype=dtype))


@both_types
@pytest.mark.parametrize("width", [576, 1040, 3072, 5120, 5136, 8192, 10256, 65536])
def test_norms_of_wide_rows(kernels: Kernels, dtype: str, width: int) -> None:
    for rows in (1, 2) if width > 10000 else (1, 2, 7):
        _normalise(kernels, _random(rows, width, dtype=dtype))


@pytest.mark.parametrize("width", [64, 2048, 65536])
def test_norms_of_unusual_rows(kernels: Kernels, width: int) -> None:
    x = _random(5, width)
    x[0] = 0
    x[1] *= 1e-4  # epsilon is most of the root
    x[2] *= 1e15
    x[3] = 0
    x[3, 7] = 3
    _normalise(kernels, x, epsilon=1e-5)


@every_kind_of_cores
def test_norms_on_any_number_of_cores(kernels: Kernels, cores: int) -> None:
    for rows, width in ((257, 64), (41, 128), (5, 1280), (3, 6144)):
        _normalise(kernels, _random(rows, width), cores=cores)


def test_a_row_that_is_not_finite_is_so_alone(kernels: Kernels) -> None:
    x = _random(9, 128)
    x[4, 5] = np.inf
    scale = np.ones(128, np.float32)
    output = kernels.rms_normalization(x, scale, epsilon=1e-6)
    assert not kernels.hazards, kernels.messages()
    assert np.isnan(output[4, 5])
    assert np.isfinite(np.delete(output, 4, axis=0)).all()


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


@both_types
@pytest.mark.parametrize("count", [16, 240, 256, 272, 3072, 8192, 8208, 60000])
def test_swish(kernels: Kernels, dtype: str, count: int) -> None:
    _swish(kernels, _random(count, dtype=dtype) * np.dtype(dtype).type(8))


@every_kind_of_cores
def test_swish_on_any_number_of_cores(kernels: Kernels, cores: int) -> None:
    for count in (16, 5 * 256, 100_000):
        _swish(kernels, _random(count), cores=cores)


@both_types
def test_swish_of_unusual_values(kernels: Kernels, dtype: str) -> None:
    x = np.zeros(16, dtype)
    x[:8] = [np.inf, np.nan, -np.inf, -0.0, 300, -300, 88, -88]
    with np.errstate(over="ignore"):
        output = kernels.swish(x)
    assert not kernels.hazards, kernels.messages()
    assert output[0] == np.inf
    assert np.isnan(output[1:3]).all()
    assert np.array_equal(output[3:7], np.array([0, 300, 0, 88], dtype))
    assert output[7] == pytest.approx(0, abs=1e-30)
    assert not output[8:].any()


@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 2, 32), (1, 3, 5, 64), (2, 17, 9, 512), (1, 8, 300, 256), (2, 300, 8, 256),
        (3, 33, 65, 32), (1, 2, 3, 65536), (2, 3, 7, 20000), (1, 1, 5, 96), (3, 5, 1, 96),
        (1, 2, 2500, 32), (1, 2500, 2, 32), (1, 2, 2, 32800),
    ],
)  # fmt: skip
def test_transpose(kernels: Kernels, shape: tuple[int, int, int, int]) -> None:
    for cores in (1, 3, 40):
        _transpose(kernels, shape, cores)


def test_an_instruction_takes_many_rows(kernels: Kernels) -> None:
    for rows, width, instructions in ((40, 128, 18), (1, 128, 12), (1, 4096, 15)):
        kernels.reset()
        _normalise(kernels, _random(rows, width), cores=1)
        assert kernels.vector_instructions <= instructions
    kernels.reset()
    _rotate(kernels, _random(64, 1, 128), 0, cores=1)
    assert kernels.vector_instructions == 6
    kernels.reset()
    _swish(kernels, _random(8192), cores=1)
    assert kernels.vector_instructions == 4


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
    def test_norms(self, every: Kernels, dtype: str) -> None:
        for width in range(16, 2065, 16):
            for rows in (1, 3, 9):
                _normalise(every, _random(rows, width, dtype=dtype))
        for rows in range(1, 300):
            _normalise(every, _random(rows, 64 + 64 * (rows % 2), dtype=dtype), cores=1 + rows % 9)
        assert every.ub_bytes <= 192 * 1024

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

    @both_types
    def test_swish(self, every: Kernels, dtype: str) -> None:
        for count in range(16, 20000, 176):
            _swish(every, _random(count, dtype=dtype), cores=count % 5 + 1)

    def test_transpose(self, every: Kernels) -> None:
        for rows in range(1, 40):
            for columns in (1, 2, 3, 8, 16, 41):
                _transpose(every, (1, rows, columns, 32 * (rows % 8 + 1)), rows % 5 + 1)
        assert every.ub_bytes <= 192 * 1024
