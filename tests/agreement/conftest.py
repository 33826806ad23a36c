"""Settings of the agreement tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def exact_products() -> Iterator[None]:
    """Products of floats, read when a session is made: what is compared here is the graph.

    Products with integers have tests of their own, in tests/parity.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TQ_ONNX_PRODUCTS", "float")
        yield
