"""What a process of tests computes once: it changes nothing but the time."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from tq_onnx.codec import rotation


@contextmanager
def remembering() -> Iterator[None]:
    """Makes each rotation once, and lists the members of each protocol once.

    onnx-ir asks for its protocols wherever it serialises; Python remembers them from 3.12 on.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotation, "make_rotation", cache(rotation.make_rotation))
        if sys.version_info < (3, 12):
            patch.setattr(typing, "_get_protocol_attrs", cache(typing._get_protocol_attrs))
        yield
