"""Settings for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings

import tests.onethread  # noqa: F401 - before whatever imports numpy
from tests.remembering import remembering

# CI must give the same answer for the same commit; anywhere else hypothesis explores. Examples may
# take any time: machines are busy.
settings.register_profile("tests", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Files keep the order of below; pytest-xdist would begin with those of the most tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out lanes that ``-m`` does not name: they take long, or environments of their own.

    The files that take longest come first: of two workers, none then waits for one at the end.
    """
    environments = ("exports", "javascript", "readme", "serving", "cann")
    lanes = (*environments, "cpp", "sanitizers")
    unnamed = [lane for lane in lanes if lane not in config.option.markexpr]
    left_out = [item for item in items if any(map(item.get_closest_marker, unnamed))]
    config.hook.pytest_deselected(items=left_out)
    kept = set(items).difference(left_out)
    items[:] = sorted(
        (item for item in items if item in kept),
        key=lambda item: item.path.parent.name != "verification",
    )


def pytest_collection_finish() -> None:
    """Has the garbage collector look less often, and pass over what the collection made.

    Models are graphs of many small objects that are in use: with Python's thresholds a fifth of the
    time of tests goes into walking through them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="module")
def exact_products() -> Iterator[None]:
    """Products of floats, read when a session is made: what rounding to 8 bits would hide shows.

    Products with integers have tests of their own, in custom_ops/tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TQ_ONNX_PRODUCTS", "float")
        yield


@pytest.fixture(scope="session", autouse=True)
def remember() -> Iterator[None]:
    """Lets a worker compute some things once, for all tests."""
    with remembering():
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)
