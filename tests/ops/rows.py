"""Rows that a runtime wrote, judged as the product judges them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ops.site import Arrays, Site
from tq_onnx.codec.acceptance import FIELD_STEPS, judge_rows
from tq_onnx.codec.quantise import tables_of


def assert_same_rows(site: Site, feeds: Arrays, presents: list[Any], expected: Any) -> None:
    """New rows are good, and all others are the same bytes."""
    for present, wanted, codec, name, rotation in (
        (presents[0], expected[0], site.key, "key", site.key_rotation),
        (presents[1], expected[1], site.value, "value", site.value_rotation),
    ):
        assert present.shape == wanted.shape
        tables = tables_of(codec, rotation, site.codebook(codec), bool(site.norm_correction))
        rest = present.copy()
        # An offset is taken away in float32, as in the bodies.
        vectors = site.centered(feeds, name).astype(np.float32)
        lengths = np.broadcast_to(feeds["past_length"], len(present))
        for b, length in enumerate(lengths):
            new = slice(length, length + vectors.shape[2])
            found = judge_rows(present[b, :, new], vectors[b], codec, tables, element=site.element)
            assert found.wrong == 0, f"{codec}: {found}"
            assert found.steps <= FIELD_STEPS, f"{codec}: {found}"
            rest[b, :, new] = wanted[b, :, new]
        np.testing.assert_array_equal(rest, wanted)
