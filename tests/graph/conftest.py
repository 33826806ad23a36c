"""One rotation is made once for all tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from tq_onnx.codec import rotation


@pytest.fixture(scope="session", autouse=True)
def remember_rotations() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotation, "make_rotation", cache(rotation.make_rotation))
        yield
