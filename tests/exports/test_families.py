"""Tiny families by mobius whose caches differ, and a pair with states by transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.agreement.harness import agreement, difference
from tests.agreement.tolerances import allowed
from tests.exports.recipes import FAMILIES, UNREACHABLE, export_once
from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.runtime.opening import open_model

pytestmark = [
    pytest.mark.exports,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="the exporters' pins need Python 3.11"),
]


PAIR = "qwen3_5_text"
CHUNK = 64
"""Tokens of its recurrence."""


def exported(route: str, folder: Path, environments: Path, families: list[str]) -> Path:
    status, told = export_once(route, folder, environments=environments, families=families)
    if status == UNREACHABLE:
        pytest.skip(told)
    assert status == 0, told
    return folder / route


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, environments: Path) -> Path:
    """The folder of all of them."""
    folder = tmp_path_factory.mktemp("families")
    return exported("mobius", folder, environments, [*FAMILIES])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_raw_conversion_is_its_original(family: str, made: Path) -> None:
    found = agreement(made / family / FAMILIES[family], "raw", library=True)

    assert found.refusal == ""
    assert {"prompt", "chunks"} <= set(found.figures)
    assert found.worst <= allowed(found, "raw"), found.figures


@pytest.mark.everything  # the export takes minutes; tests/recognise/test_chunks.py is small
def test_a_pair_shares_caches_and_states(tmp_path: Path, environments: Path) -> None:
    """Calls longer than a chunk are wrong in the original, too: prompts are read in chunks."""
    original = exported("transformers", tmp_path, environments, [PAIR]) / PAIR
    converted = convert_folder(original, tmp_path / "raw", preset="raw").output
    tokens = np.random.default_rng(0).integers(3, 61, (1, 2 * CHUNK + 1))
    logits = []
    for folder in (original, converted):
        first, then = (open_model(folder / f"{name}.onnx") for name in ("prefill", "decode"))
        for decoder in (then.decoder(), then.decoder(first=first)):
            assert [call.stop - call.start for call in decoder.calls(CHUNK + 1)] == [CHUNK, 1]
            logits.append(decoder.prefill(tokens)[0].astype(np.float64))
    stepping = then.decoder()
    expected = np.stack([stepping.step([token])[0] for token in tokens[0]]).astype(np.float64)
    bound = allowed(agreement(original / "decode.onnx", "raw"), "raw")
    assert all(difference(expected, each) <= bound for each in logits)
