"""What converted models are run by: their own function bodies, and the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from tests.recognise.dialects import gqa_oracle
from tq_onnx.codec import rotation


@pytest.fixture(scope="session", autouse=True)
def remember_rotations() -> Iterator[None]:
    """One rotation is made once for all tests of this room."""
    remembered = cache(rotation.make_rotation)
    with pytest.MonkeyPatch.context() as patch:
        for module in (rotation, gqa_oracle):
            patch.setattr(module, "make_rotation", remembered)
        yield


@pytest.fixture(params=["bodies", "library"])
def library(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "library")


@pytest.fixture(scope="module", autouse=True)
def products(exact_products: None) -> None:
    """What is compared here is the graph."""
