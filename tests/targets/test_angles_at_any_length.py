"""Keys that turn otherwise in long texts are found before any text is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.runtime.models import DYNAMO, original
from tq_onnx.conversion.branches import load_decoder
from tq_onnx.conversion.original import recognise_original
from tq_onnx.conversion.pipeline import prepare
from tq_onnx.quality.calibrate import calibrate
from tq_onnx.recognise.positions import table_positions
from tq_onnx.targets.angles_at_any_length import length_complaints

OTHERS = "has other numbers for the same positions in texts of other lengths"
NOT_ON = "does not go on with positions as it begins"
LONG = "most = ReduceMax<keepdims = 0>(position_ids) is_long = Greater(most, limit)"
POSITIONS = {
    "double": ("q = Mul(position_ids, two)", ""),
    "backwards": ("q = Sub(limit, position_ids)", ""),
    "jump": ("far = Add(position_ids, limit) late = Greater(position_ids, limit)"
             "q = Where(late, far, position_ids)", NOT_ON),
    "end": ("q = Min(position_ids, limit)", NOT_ON),
    "other angles": (f"{LONG} half = Div(position_ids, two)"
                     "q = Where(is_long, half, position_ids)", OTHERS),
    "branches": (f"""{LONG} q = If(is_long) <
        then_branch = one () => (int64[B, T] x) {{ x = Div(position_ids, two) }},
        else_branch = other () => (int64[B, T] x) {{ x = Identity(position_ids) }}>""", OTHERS),
    "of a call": ("least = ReduceMin(position_ids) q = Sub(position_ids, least)", OTHERS),
    "of tokens": ("none = Sub(input_ids, input_ids) skipped = Less(input_ids, two)"
                  "q = Where(skipped, none, position_ids)", "depend on the contents of input_ids"),
}  # fmt: skip
"""What a graph makes of the positions, and what is said of it."""


def moved(name: str, nodes: str, path: Path) -> Path:
    """An export that turns its keys by other positions, ``q``."""
    head = "(int64[B, T] position_ids, int64[B, T] input_ids) => (int64[B, T] q)"
    constants = "limit = Constant<value_int = 600>() two = Constant<value_int = 2>()"
    added = onnx.parser.parse_graph(f"added {head} {{ {constants} {nodes} }}").node
    model = onnx.load(original(name))
    for node in model.graph.node:
        node.input[:] = ["q" if read == "position_ids" else read for read in node.input]
    together = [*added, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(together)
    onnx.save(model, path)
    return path


def complaints(path: Path) -> list[str]:
    raw = prepare(path, preset="raw", original=recognise_original(load_decoder(path), path))
    model = raw.loaded.model
    return length_complaints(model, raw.plan, table_positions(model, raw.plan.interface))


@pytest.mark.parametrize("name", [DYNAMO, "dynamo-op23-sdpa"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_positions(tmp_path: Path, name: str, positions: str) -> None:
    nodes, wanted = POSITIONS[positions]
    for found in complaints(moved(name, nodes, tmp_path / "model.onnx")):
        assert found.endswith(wanted) if wanted else not found, found


@pytest.mark.parametrize(
    "name",
    [
        "dynamo-gemma3",  # two bases
        "dynamo-op18-sdpa-bf16",
        "genai-cpu-fp16",  # RotaryEmbedding reads rows of a table
        "genai-cpu-int4",
        "hf-ortcuda-decode",  # one row for each token of a call, and no table
        "hf-static-ortcuda-decode",
        "legacy-one-token",
        "mobius-default",
    ],
)
def test_real_exports_turn_alike_at_any_length(name: str) -> None:
    assert not any(complaints(original(name)))


def test_a_table_that_does_not_go_on_is_found(tmp_path: Path) -> None:
    model = onnx.load(original("genai-cpu-fp16"))
    for tensor in model.graph.initializer:
        if tensor.name in ("cos_cache", "sin_cache"):
            rows = onnx.numpy_helper.to_array(tensor).copy()
            rows[40:] = rows[:24]
            tensor.CopyFrom(onnx.numpy_helper.from_array(rows, tensor.name))
    onnx.save(model, tmp_path / "model.onnx")
    assert complaints(tmp_path / "model.onnx") == [f"cos_cache {NOT_ON}"] * 2


def test_such_keys_are_not_centered(tmp_path: Path) -> None:
    """The angles of the first positions are as they are in any model, and so is the text."""
    path = moved(DYNAMO, POSITIONS["other angles"][0], tmp_path / "model.onnx")
    text = np.random.default_rng(3).integers(0, 61, 100)
    found = calibrate(path, text, context=50, library=False, threads=1)
    assert found.turns_unknown.startswith("the keys of layer 0 and 1 more are not centered: ")
    assert found.turns_unknown.endswith(OTHERS)
    assert not any(np.any(layer.k_turned_mean) for layer in found.layers)
