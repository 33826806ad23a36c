"""What converted models are run by: their own function bodies, and the kernels."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["bodies", "library"])
def library(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "library")


@pytest.fixture(scope="module", autouse=True)
def products(exact_products: None) -> None:
    """What is compared here is the graph."""
