"""What is compared in these tests is the graph."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def products(exact_products: None) -> None:
    """Rounding of products to 8 bits is none of it."""
