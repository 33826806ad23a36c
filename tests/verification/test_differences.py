"""What a conversion changed, counted in both graphs."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import tq_onnx
from tests.cli.run import run
from tests.language.models import folder
from tq_onnx.errors import UnsupportedModelError, VerificationError


def paths(form: str = "window") -> tuple[Path, Path]:
    return folder("original") / "model.onnx", folder(form) / "model.onnx"


def test_caches_nodes_and_weights() -> None:
    original, converted = paths()
    found = tq_onnx.diff(original, converted)
    before, after = onnx.load(original).graph, onnx.load(converted).graph
    assert (found.preset, len(found.layers)) == ("int4", 4)
    assert (found.nodes_before, found.nodes_after) == (len(before.node), len(after.node))
    assert found.nodes_after - found.nodes_before == sum(
        one.after - one.before for one in found.operators
    )
    layers = found.layers
    removed = sum(one.before for layer in layers for one in layer.removed)
    added = sum(one.before for layer in layers for one in layer.added)
    assert found.nodes_before - removed + added == found.nodes_after
    own = {(one.op_type, one.before) for one in layers[2].added if one.domain}
    assert own == {("TurboQuantEncode", 2), ("TurboQuantDequantAttention", 1)}
    key = layers[0].key
    assert key.name == "past_key_values.0.key"
    assert key.before.startswith("float[") and key.before.endswith(", 128]")
    assert key.after.startswith("uint8[") and key.after.endswith(", 66]")
    assert (key.bytes_before, key.bytes_after) == (2 * 512, 2 * 66)
    assert (layers[0].key_codec, layers[0].value_codec) == ("lloyd_max 4", "lloyd_max 4")
    assert (found.bytes_per_token_before, found.bytes_per_token_after) == (8192, 1056)
    assert found.window_bytes > 0
    ones, others = ({one.name: one for one in graph.initializer} for graph in (before, after))
    changed = {
        name
        for name in ones.keys() | others.keys()
        if name not in ones
        or name not in others
        or onnx.numpy_helper.to_array(ones[name]).tobytes()
        != onnx.numpy_helper.to_array(others[name]).tobytes()
    }
    assert {one.name for one in found.initializers} == changed
    sizes = {one.name: (one.bytes_before, one.bytes_after) for one in found.initializers}
    assert sizes["tq.rotation.2"] == (0, 128 * 128 * 4)
    assert sizes["tq.query_scale.2"] == (0, 4 * 128 * 4)


def test_the_command() -> None:
    outcome = run("diff", *paths())
    assert outcome.code == 0
    assert "8,192 cache bytes per token before, 1,056 after and " in outcome.out
    assert "2 TurboQuantEncode" in outcome.out
    document = run("diff", folder("original"), folder("int4"), "--json").document
    assert document["window_bytes"] == 0 and len(document["layers"]) == 4


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    original, converted = paths()
    with pytest.raises(UnsupportedModelError, match="was not converted"):
        tq_onnx.diff(original, original)
    with pytest.raises(UnsupportedModelError, match="already"):
        tq_onnx.diff(converted, converted)
    other = onnx.load(original)
    for entry in other.graph.input:
        entry.name = entry.name.replace("past_key_values.3", "past_key_values.9")
    for node in other.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = name.replace("past_key_values.3", "past_key_values.9")
    onnx.save(other, tmp_path / "other.onnx")
    with pytest.raises(VerificationError, match="not made from this original"):
        tq_onnx.diff(tmp_path / "other.onnx", converted)
    assert "no such file" in run("diff", original, "nowhere.onnx").sentence(4)
    web = tq_onnx.convert(original, tmp_path / "web.onnx", target="web", preset="int4").output
    with pytest.raises(UnsupportedModelError, match="compares it with its original"):
        tq_onnx.diff(original, web)
