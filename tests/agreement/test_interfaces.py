"""Inputs and outputs that options of exporters add or take away: driven, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.agreement import surgery
from tests.agreement.harness import Run, agreement, opened
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert, prepare
from tq_onnx.conversion.planning import DEFAULT_OPTIONS
from tq_onnx.errors import TqOnnxError, UnsupportedModelError, UsageError
from tq_onnx.plan import IGNORED, LOGITS_TO_KEEP, PAST_LENGTH, TOTAL_LENGTH, VISIBLE, ExtraInput
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_model, open_original
from tq_onnx.verification.verify import verify

FIXTURES = Path(__file__).parents[1] / "fixtures"
GENAI = FIXTURES / "genai-cpu-fp32.onnx"
Surgery = Callable[[ir.Model], None]

OPERATIONS: list[Surgery] = [
    surgery.embeddings_given,
    surgery.no_output_projection,
    surgery.last_logits_only,
    surgery.logits_to_keep,
    surgery.counted_twice,
]


def operated(folder: Path, operation: Surgery, path: Path = GENAI) -> Path:
    model = ir.load(path)
    operation(model)
    ir.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_changed_interface_is_driven(operation: Surgery, tmp_path: Path) -> None:
    found = agreement(operated(tmp_path, operation), "raw")

    assert found.refusal == ""
    assert {"prompt", "chunks", "batch", "in place"} <= set(found.figures)
    assert found.worst < 1e-4


@pytest.mark.parametrize("operation", OPERATIONS)
def test_verify_drives_both_models(operation: Surgery, tmp_path: Path) -> None:
    path = operated(tmp_path, operation)
    made = tmp_path / "made.onnx"
    convert(path, made)

    report = verify(path, made, 64, source="", context=32, new_tokens=4, threads=1)

    assert [check.detail for check in report.checks if not check.holds] == []


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (surgery.embeddings_given, r"takes embeddings \(inputs_embeds\), not tokens"),
        (surgery.no_output_projection, r"gives hidden states \(hidden_states\), not logits"),
    ],
)
def test_what_is_no_text_is_refused(operation: Surgery, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_model(operated(tmp_path, operation)).refuse_text()
    open_model(GENAI).refuse_text()


def test_an_input_that_matters_and_is_unknown_is_named(tmp_path: Path) -> None:
    def operation(model: ir.Model) -> None:
        given = ir.Value(
            name="temperature", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1])
        )
        model.graph.inputs.append(given)
        logits = model.graph.outputs[0]
        logits.name = "raw_logits"
        scaled = ir.Value(name="logits", type=logits.type, shape=logits.shape)
        model.graph.append(ir.node("Mul", [logits, given], outputs=[scaled]))
        model.graph.outputs[0] = scaled

    path = operated(tmp_path, operation)

    assert prepare(path).plan.interface.fed == ()
    with pytest.raises(UnsupportedModelError, match="does not have: temperature"):
        open_model(path).decoder()


@pytest.mark.parametrize(
    ("name", "roles", "static", "left", "right"),
    [
        ("genai-cpu-fp32", {}, False, False, True),
        ("dynamo-op18-sdpa", {}, False, True, False),
        ("mobius-static", {PAST_LENGTH, TOTAL_LENGTH}, True, True, False),
        ("hf-static-decode", {VISIBLE, PAST_LENGTH}, True, True, False),
        ("hf-ortcuda-decode", {}, False, True, False),
    ],
)
def test_roles_of_inputs(name: str, roles: set[str], static: bool, left: bool, right: bool) -> None:
    interface = prepare(FIXTURES / f"{name}.onnx").plan.interface

    assert {entry.role for entry in interface.fed} == set(roles)
    assert (interface.static, interface.hidden) == (static, False)
    assert (interface.padding, interface.right_padding) == (left, right)
    assert interface.vocabulary is not None


def test_one_layer_that_counts_by_other_means_is_enough(tmp_path: Path) -> None:
    def operation(model: ir.Model) -> None:
        last = [node for node in model.graph if node.op_type == "GroupQueryAttention"][-1]
        lengths = last.inputs[5]
        assert lengths is not None
        taps = ir.tape.Tape(model.graph)
        mask = next(value for value in model.graph.inputs if value.name == "attention_mask")
        total = taps.op("Shape", [mask], {"start": 1, "end": 2})
        one = taps.initializer(ir.tensor(np.array([1], np.int64), name="one_token"))
        before = taps.op("Sub", [total, one])
        last.replace_input_with(5, taps.op("Cast", [before], {"to": lengths.dtype}))
        model.graph.sort()

    interface = prepare(operated(tmp_path, operation, GENAI)).plan.interface

    assert (interface.padding, interface.right_padding) == (False, False)


def test_roles_do_not_go_by_names(tmp_path: Path) -> None:
    def rename(model: ir.Model) -> None:
        for index, value in enumerate((*model.graph.inputs, *model.graph.outputs)):
            value.name = f"value_{index}"

    interface = prepare(operated(tmp_path, rename, FIXTURES / "mobius-static.onnx")).plan.interface

    assert sorted(entry.role for entry in interface.fed) == [PAST_LENGTH, TOTAL_LENGTH]
    assert interface.static


def test_roles_of_added_inputs(tmp_path: Path) -> None:
    for operation, role, name in (
        (surgery.logits_to_keep, LOGITS_TO_KEEP, "num_logits_to_keep"),
        (surgery.counted_twice, IGNORED, "window"),
    ):
        assert prepare(operated(tmp_path, operation)).plan.interface.fed == (
            ExtraInput(name, role),
        )


def pair(
    preset: str | None, then_options: Options = DEFAULT_OPTIONS
) -> tuple[OpenModel, OpenModel]:
    paths = [FIXTURES / f"hf-static-{part}.onnx" for part in ("prefill", "decode")]
    if preset is None:
        return open_original(paths[0], threads=1), open_original(paths[1], threads=1)
    first, then = (
        opened(prepare(path, preset=preset, options=options).loaded.model, path, library=True)
        for path, options in zip(paths, (DEFAULT_OPTIONS, then_options), strict=True)
    )
    return first, then


def test_graphs_that_were_not_converted_alike_make_no_pair() -> None:
    for options in (Options(seed=43), Options(rotation="hadamard"), Options(layers="0")):
        first, then = pair("int4", options)
        with pytest.raises(UsageError, match="not converted alike in the caches of layer"):
            then.decoder(first=first)
    with pytest.raises(UsageError, match="were not converted alike"):
        then.decoder(first=pair(None)[0])


@pytest.mark.parametrize("preset", [None, "raw", "int4"])
def test_a_decode_graph_continues_what_a_prefill_graph_began(preset: str | None) -> None:
    first, then = pair(preset)
    tokens = Run((6, 3)).data(then.vocabulary, 0).tokens
    alone, both = then.decoder(), then.decoder(first=first)

    expected, found = alone.prefill(tokens), both.prefill(tokens)

    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    assert both.length == alone.length == 9
    assert both.slots == then.signature.slots


def test_a_prefill_graph_takes_one_prompt_of_its_length() -> None:
    first, then = pair(None)
    decoder = first.decoder()
    with pytest.raises(UsageError, match="3 tokens were given to a graph that takes 6"):
        decoder.prefill(np.zeros((1, 3), np.int64))
    decoder.prefill(np.zeros((1, 6), np.int64))
    with pytest.raises(TqOnnxError, match="takes a first prompt only"):
        decoder.prefill(np.zeros((1, 6), np.int64))
    with pytest.raises(UsageError, match="one that continues its caches"):
        first.decoder(first=then)
    with pytest.raises(UsageError, match="3 sequences were given to a graph that takes 2"):
        then.decoder(batch=3)
    assert then.signature.slots is not None
    with pytest.raises(UsageError, match="the caches of this model hold"):
        then.decoder(capacity=then.signature.slots + 1)


@pytest.mark.parametrize(
    "name", ["mobius-static", "hf-static-decode", "hf-ortcpu-prefill", "hf-ortcuda-decode"]
)
def test_verify_holds_for_other_forms_of_caches(name: str, tmp_path: Path) -> None:
    path = FIXTURES / f"{name}.onnx"
    made = tmp_path / "made.onnx"
    convert(path, made, preset="int4")

    report = verify(path, made, 64, source="", context=64, new_tokens=4, threads=1)

    assert [(check.name, check.detail) for check in report.checks if not check.holds] == []
