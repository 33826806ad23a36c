"""Exports that went through the usual post-processors agree with their conversion."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.agreement.harness import agreement
from tests.agreement.postprocessors import (
    Processor,
    bare,
    bnb4,
    dynamic,
    dynamic_optimised,
    half,
    half_but_norms,
    half_inside,
    half_inside_bare,
    inferred,
    optimised,
    q4,
    q4_dequantized,
    q4_half_inside,
    q4_table,
    q8,
)
from tests.agreement.tolerances import allowed
from tests.decoders.running import FIXTURES

#: Every processor with the export that takes most to follow, and others where they differ.
CASES: list[tuple[str, Processor]] = [
    *(
        ("legacy-op17-sdpa", process)
        for process in (
            *(inferred, bare, q4, q8, bnb4, dynamic, dynamic_optimised),
            *(half, half_inside, half_inside_bare, half_but_norms, q4_half_inside, optimised),
        )
    ),
    *(("dynamo-op18-eager", process) for process in (q4_table, q4_dequantized, half_inside)),
    *(("legacy-one-token", process) for process in (q4, half_inside)),
    ("mobius-default", half_inside_bare),
    ("mobius-static", half_inside_bare),
    ("dynamo-qwen3-moe", q4_half_inside),
    ("hf-prefill", half_inside),
]


@pytest.mark.parametrize(
    ("name", "process"), CASES, ids=[f"{name}-{process.__name__}" for name, process in CASES]
)
def test_a_conversion_is_its_post_processed_original(
    name: str, process: Processor, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(process(onnx.load(FIXTURES / f"{name}.onnx")), path)

    for preset in ("raw", "int4"):
        found = agreement(path, preset, library=True)

        assert found.refusal == ""
        if process in (dynamic, dynamic_optimised):
            # Steps of activations depend on the rows of padding, too, of which attention makes
            # zeros: noise of another call then.
            found.figures.pop("padded")
        assert found.worst <= allowed(found, preset), found.figures
