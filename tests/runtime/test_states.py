"""Decoders hand the states of recurrent layers from call to call, as they do with caches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.agreement.harness import agreement
from tests.recognise.test_passthrough import recurrent
from tq_onnx.conversion.inspect import inspect
from tq_onnx.runtime.opening import open_original


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "model.onnx"
    ir.save(recurrent(), path)
    return path


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("preset", ["raw", "int4"])
def test_a_hybrid_is_fed_its_states(hybrid: Path, preset: str) -> None:
    found = agreement(hybrid, preset, library=True)

    # This state depends on where calls end, so that sequences one by one are no reference.
    del found.figures["batch"]
    assert found.refusal == ""
    assert found.worst <= 1e-5
    assert {"chunks", "in place"} <= set(found.figures)


def test_states_matter_and_are_forgotten(hybrid: Path) -> None:
    decoder = open_original(hybrid, threads=1).decoder()
    first, again = decoder.prefill([[5, 6, 7]]), decoder.prefill([[5, 6, 7]])
    decoder.reset()

    assert np.abs(first - again).max() > 1e-2
    assert np.array_equal(decoder.prefill([[5, 6, 7]]), first)


def test_inspect_names_them(hybrid: Path) -> None:
    assert inspect(hybrid).states == ("present_state",)


def test_bytes_per_token_count_what_grows(hybrid: Path) -> None:
    assert open_original(hybrid, threads=1).signature.bytes_per_token == 2 * 2 * 16 * 4
