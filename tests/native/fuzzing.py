"""How the operators are fuzzed: the same draws in every run, now and then one input spoiled."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.native.conftest import Feeds
from tests.native.single_node import Array
from tq_onnx.codec.spec import Codec

FUZZ = settings(
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,  # for python -m tests.fuzz, too, which reads no tests/conftest.py
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def spoiled(data: st.DataObject, feeds: Mapping[str, Array]) -> Feeds:
    """Now and then one input with another shape (which may still fit)."""
    out = dict(feeds)
    if data.draw(st.integers(0, 2)):
        return out
    name = data.draw(st.sampled_from(sorted(out)))
    shape = list(out[name].shape)
    change = data.draw(st.sampled_from(["rank", "more", "dimension"])) if shape else "more"
    if change == "rank":
        shape = shape[1:]
    elif change == "more":
        shape = [1, *shape]
    else:
        at = data.draw(st.integers(0, len(shape) - 1))
        shape[at] = data.draw(st.sampled_from([0, 1, shape[at] - 1, shape[at] + 1, 8]))
        shape[at] = max(0, shape[at])
    if math.prod(shape) > 2**20:  # an empty one whose other dimensions are huge
        return out
    out[name] = np.resize(out[name], shape) if out[name].size else np.zeros(shape, out[name].dtype)
    return out


def rotation_fits(codec: Codec, size: int, rotation: Array) -> bool:
    return rotation.shape == (size, codec.coordinates(size))
