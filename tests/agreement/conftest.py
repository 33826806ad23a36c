"""Settings of the agreement tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def products(exact_products: None) -> None:
    """What is compared here is the graph."""
