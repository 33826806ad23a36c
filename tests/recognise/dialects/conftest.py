"""What converted models are run by: their own function bodies, and the kernels."""

from __future__ import annotations

import pytest

from tests.covering import MOSTLY_KERNELS


@pytest.fixture(params=MOSTLY_KERNELS)
def library(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module", autouse=True)
def products(exact_products: None) -> None:
    """What is compared here is the graph."""
