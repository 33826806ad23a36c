"""A converted model opens in Netron, and its operators can be read there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tq_onnx.conversion.pipeline import convert

from .page import chromium, picture

FIXTURES = Path(__file__).parents[1] / "fixtures"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="needs Chromium (Debian package: chromium)"),
]


@pytest.mark.parametrize(
    "name", ["dynamo-op18-sdpa", "genai-cpu-fp32", "legacy-op17-sdpa", "mobius-static"]
)
def test_netron_draws_every_operator_of_ours(name: str, tmp_path: Path) -> None:
    output = tmp_path / "converted.onnx"
    report = convert(FIXTURES / f"{name}.onnx", output)

    page = picture(output, tmp_path / "picture.png")
    labels = re.findall(r"<text[^>]*>([^<]+)</text>", page)

    layers = len(report.plan.layers)
    # Netron cuts titles after 21 characters, in the middle.
    assert labels.count("TurboQuantEncode") == 2 * layers
    assert sum(label.startswith("TurboQuant…") for label in labels) == layers
    for layer in report.plan.layers:
        assert {layer.key.past, layer.key.present} <= set(labels)
    # The node that the page is opened at, and its name in the properties.
    assert len(re.findall(r'class="node graph-node select"', page)) == 1
    assert "layers.0.attention/TurboQuantDequantAttention" in re.sub(r"<text.*?</text>", "", page)
    assert [
        label for label in labels if "?" in label and label.count("\N{MULTIPLICATION SIGN}") == 3
    ] == []
