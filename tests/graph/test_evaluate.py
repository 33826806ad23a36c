"""Operators that the evaluator of parts of a graph has of its own."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference.ops.op_gathernd import _gather_nd_impl

from tq_onnx.graph.evaluate import GatherND


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("shape", [(), (4,), (1, 5)])
def test_numbers_are_gathered_as_by_onnx(batch: tuple[int, ...], shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    for sizes in ((3,), (3, 4), (3, 4, 2)):
        data = rng.standard_normal((*batch, *sizes))
        for width in range(1, len(sizes) + 1):
            places = [rng.integers(-size, size, (*batch, *shape)) for size in sizes[:width]]
            indices = np.stack(places, axis=-1)
            (found,) = GatherND._run(None, data, indices, len(batch))
            (wanted,) = _gather_nd_impl(data, indices, len(batch))
            np.testing.assert_array_equal(found, wanted, strict=True)


def test_places_outside_are_no_numbers() -> None:
    with pytest.raises(IndexError):
        GatherND._run(None, np.zeros((2, 3)), np.array([[2, 0]]))
