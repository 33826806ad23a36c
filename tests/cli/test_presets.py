from __future__ import annotations

import pytest

from tests.cli.run import run
from tq_onnx.codec.presets import LISTED_PRESETS


def test_every_preset_is_listed_with_its_bytes() -> None:
    outcome = run("presets")
    assert (outcome.code, outcome.err) == (0, "")
    lines = {line.split()[0]: line for line in outcome.out.splitlines() if line.strip()}
    names = [preset.name for preset in LISTED_PRESETS]
    assert set(names) <= set(lines)
    assert "(default)" in lines["int4"]
    assert " 132 " in lines["int4"] and "several gains" in lines["int4"]
    assert " 132 " in lines["mse4"] and "Algorithm 1" in lines["mse4"]
    for name, slot in (("k8v4", 196), ("4bit_nc", 134), ("k3v4_nc", 118), ("3bit_nc", 102)):
        assert f" {slot} " in lines[name]
        assert f"its slot: {slot} bytes" in lines[name]
    marked = {name for name in names if "experimental" in lines[name].replace(name, "")}
    assert marked == {preset.name for preset in LISTED_PRESETS if preset.experimental}


@pytest.mark.parametrize("head_size", [64, 128])
def test_as_json(head_size: int) -> None:
    found = {
        entry["preset"]: entry
        for entry in run("presets", "--json", "--head-size", head_size).document
    }
    assert list(found) == [preset.name for preset in LISTED_PRESETS]
    assert found["int4"]["bytes_per_token"] == head_size + 4
    assert found["raw"]["ratio"] == 1
    assert found["k8v4"]["vllm_slot"] == (196 if head_size == 128 else None)


def test_a_head_size_without_rows() -> None:
    assert "not a multiple of 8" in run("presets", "--head-size", 20).sentence(2)
