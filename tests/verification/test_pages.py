"""``verify`` of a model whose caches lie in pages: what holds, and what is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.decoders.running import FIXTURES
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import LibraryError
from tq_onnx.measure.oracle import KERNEL
from tq_onnx.ops.operators import PagedAttention, PagedEncode
from tq_onnx.targets.registry import target_of
from tq_onnx.verification.findings import VerifyReport
from tq_onnx.verification.verify import verify

ORIGINAL = FIXTURES / "genai-cpu-fp32.onnx"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("pages") / "paged.onnx"
    convert(ORIGINAL, output, preset="int4", target=target_of("paged", block_size=16))
    return output


def verified(path: Path, *, library: bool = True, quick: bool = True) -> VerifyReport:
    return verify(ORIGINAL, path, 200, source="random", library=library, threads=1, quick=quick)


def test_a_conversion_holds(converted: Path) -> None:
    report = verified(converted, quick=False)
    assert report.holds, report.checks
    assert {layer.backend for layer in report.ladder} == {KERNEL}
    assert report.logits_kernel_body is None
    assert report.quality is not None
    assert report.quality.logit_relative_error < 0.3
    names = {check.name for check in report.checks}
    assert "pages in another order give the same bits" in names
    assert "caches in place equal growing caches" in names


def test_without_the_library_it_is_refused(converted: Path) -> None:
    with pytest.raises(LibraryError, match="in pages run on the operator library only") as refusal:
        verified(converted, library=False)
    assert refusal.value.fix == "leave `library=False` out"


@pytest.mark.parametrize("name", ["hf-decode", "hf-ortcuda-decode"])
def test_exports_with_other_names(name: str, tmp_path: Path) -> None:
    original, output = FIXTURES / f"{name}.onnx", tmp_path / "paged.onnx"
    convert(original, output, preset="int4", target=target_of("paged", block_size=16))
    report = verify(original, output, 200, source="random", threads=1, quick=True)
    assert report.holds, report.checks


def nudge_weight(model: ir.Model) -> None:
    name, value = next(
        (name, value)
        for name, value in model.graph.initializers.items()
        if "o_proj" in name and value.dtype is ir.DataType.FLOAT
    )
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.05), name=name)


def nudge_rare_token(model: ir.Model) -> None:
    """A row of the embeddings that no text of the test reads."""
    gather = next(node for node in model.graph if node.op_type == "Gather" and is_embedding(node))
    table = gather.inputs[0]
    assert table is not None
    assert table.const_value is not None
    array = table.const_value.numpy().copy()
    array[-1] *= 2
    table.const_value = ir.tensor(array, name=table.name)


def is_embedding(node: ir.Node) -> bool:
    table = node.inputs[0]
    return table is not None and table.const_value is not None and table.const_value.size > 97


def turn_rotation(model: ir.Model) -> None:
    table = PagedEncode.rotation.of(PagedEncode.nodes(model.graph)[-1])
    assert table is not None
    assert table.const_value is not None
    assert table.const_value.size > 1
    table.const_value = ir.tensor(-table.const_value.numpy(), name=table.name)


def shorten_window(model: ir.Model) -> None:
    for node in PagedAttention.nodes(model.graph):
        node.attributes["sliding_window"] = ir.AttrInt64("sliding_window", 5)


def forget_past(model: ir.Model) -> None:
    """Positions that begin with each call."""
    node = next(node for node in model.graph if (node.name or "").endswith("paged/moved"))
    starts = node.inputs[1]
    node.replace_input_with(0, starts)


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (nudge_weight, "all but the codecs"),
        (nudge_rare_token, "weights and nodes"),
        (turn_rotation, "baked tables"),
        (shorten_window, "layers are what the plan"),
        (forget_past, "all but the codecs"),
    ],
)
def test_damage_is_found(
    damage: Callable[[ir.Model], None], check: str, converted: Path, tmp_path: Path
) -> None:
    model = ir.load(converted)
    damage(model)
    path = tmp_path / "damaged.onnx"
    ir.save(model, path)
    report = verified(path)
    lost = [one.name for one in report.checks if one.holds is False]
    assert any(name.startswith(check) for name in lost), lost
