"""Conversions with an exact window: what ``verify`` says of them, and what callers see."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.runtime.models import DYNAMO, GENAI, HALF, original
from tests.verification.test_verify import TEXT, failed
from tq_onnx.codec.presets import PRESETS
from tq_onnx.codec.window import window_of
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert, prepare
from tq_onnx.conversion.planning import make_plan
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.files.load import load
from tq_onnx.plan import plan_in
from tq_onnx.recognise.match import recognise
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_converted, open_model
from tq_onnx.targets.registry import target_of
from tq_onnx.verification.verify import verify

STATIC = "mobius-static"
DECODE = "hf-decode"
LEGACY = "legacy-op17-sdpa"
WINDOW = Options(residual_length=16, sink_tokens=4)
SPARE = replace(WINDOW, spare_rows=True)
FED = TEXT[None, 12:72] % 61
"""No code tips in these tokens."""
both_places = pytest.mark.parametrize("place", [WINDOW, SPARE], ids=["in front", "spare rows"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("windows")


def converted(folder: Path, name: str, options: Options = WINDOW) -> Path:
    output = folder / f"{name}.{hash(options)}.onnx"
    if not output.exists():
        convert(original(name), output, options=options)
    return output


def checked(folder: Path, name: str, options: Options = WINDOW) -> Any:
    text = TEXT % 61
    return verify(
        original(name),
        converted(folder, name, options),
        text,
        source="a test",
        new_tokens=8,
        context=96,
        threads=1,
    )


@pytest.mark.parametrize("name", [DYNAMO, GENAI, STATIC, DECODE, LEGACY])
def test_a_conversion_holds(folder: Path, name: str) -> None:
    report = checked(folder, name)
    assert report.holds, [entry for entry in report.checks if not entry.holds]


def test_a_conversion_with_planes_holds_unless_a_node_has_rows(folder: Path) -> None:
    has_planes = replace(WINDOW, planes=True)
    report = checked(folder, DYNAMO, has_planes)
    assert report.holds, [entry for entry in report.checks if not entry.holds]
    model, after = onnx.load(converted(folder, DYNAMO, has_planes)), folder / "rows.onnx"
    node = [each for each in model.graph.node if each.op_type == "TurboQuantEncode"][-1]
    node.attribute.remove(next(each for each in node.attribute if each.name == "planes"))
    onnx.save(model, after)
    report = verify(original(DYNAMO), after, TEXT % 61, source="a test", context=96, threads=1)
    names = [entry.name for entry in report.checks if not entry.holds]
    assert "layers are what the plan and the original say" in names
    assert "caches in place equal growing caches" in names


def test_a_conversion_with_spare_rows_holds(folder: Path) -> None:
    report = checked(folder, GENAI, SPARE)
    assert report.holds, [entry for entry in report.checks if not entry.holds]
    growing = replace(recognise(load(original(GENAI)).model), fixed_capacity=False)
    fixed = recognise(load(original(STATIC)).model)
    for recognition, reason in ((growing, "caches must grow"), (fixed, "fixes the number of rows")):
        with pytest.raises(UnsupportedModelError, match=f"{reason}, which leaves no place for"):
            make_plan(recognition, PRESETS["int4"], SPARE)
        plan = make_plan(recognition, PRESETS["int4"], Options(spare_rows=True))
        assert not plan.has_window


@both_places
def test_layers_that_stay_uncompressed_have_its_rows_and_no_entries(
    folder: Path, place: Options
) -> None:
    options = replace(place, layers="1")
    report = checked(folder, GENAI, options)
    assert report.holds, [entry for entry in report.checks if not entry.holds]
    model = onnx.load(converted(folder, GENAI, options), load_external_data=False)
    plan = plan_in({entry.key: entry.value for entry in model.metadata_props})
    assert plan is not None
    assert [plan.window_of(layer).entries for layer in plan.layers] == [0, 20]


def test_all_caches_have_as_many_rows(folder: Path) -> None:
    """Keys of 4 bits and values of 2: their entries take 4 and 8 rows at D = 64."""
    options = Options(residual_length=16, sink_tokens=4, bits_v=2)
    plan = prepare(original(GENAI), options=options).plan
    assert plan.overlay_rows == window_of(16, 4, [(64, 34), (64, 18)]).overlay_rows == 20 * 8
    assert plan.window_bytes == 160 * plan.bytes_per_token


@pytest.mark.parametrize("damage", ["recent", "sinks", "new_keys"])
def test_a_window_that_is_not_as_planned_is_found(folder: Path, damage: str) -> None:
    after = folder / f"damaged-{damage}.onnx"
    model = onnx.load(converted(folder, GENAI))
    node = next(each for each in model.graph.node if each.op_type == "TurboQuantDequantAttention")
    attributes = {each.name: each for each in node.attribute}
    if damage in attributes:
        attributes[damage].i -= 1
    else:
        node.input[-2] = node.input[-1]
    onnx.save(model, after)
    report = verify(original(GENAI), after, TEXT % 61, source="a test", context=96, threads=1)
    assert "layers are what the plan and the original say" in failed(report)


def fed(model: OpenModel, chunk: int | None, **options: Any) -> tuple[np.ndarray, Decoder]:
    """Logits of a text in calls of so many tokens, beginning with buffers of random bytes."""
    decoder = model.decoder(**options)
    rng = np.random.default_rng(len(options))
    for value in decoder._caches.past:
        shape = tuple(value.shape())
        if np.prod(shape):
            value.update_inplace(rng.integers(0, 256, shape, np.uint8))
    return decoder.prefill(FED, chunk=chunk)[0], decoder


@both_places
@pytest.mark.parametrize("library", [True, False])
def test_a_prompt_at_once_is_its_tokens_one_by_one(
    folder: Path, library: bool, place: Options
) -> None:
    model = open_converted(converted(folder, DYNAMO, place), library=library, threads=1)
    whole, _ = fed(model, None)
    steps, _ = fed(model, 1)
    in_place, _ = fed(model, 1, capacity=64)
    np.testing.assert_allclose(steps, whole, atol=1e-4 * np.abs(whole).max())
    np.testing.assert_array_equal(in_place, steps)
    # In several calls some tokens are read from their rows: as well as without a window, or better.
    parts, _ = fed(model, 20)
    assert 1e-4 < np.abs(parts - whole).max() / np.abs(whole).max() < 0.5


@both_places
def test_what_a_buffer_held_before_does_not_show(folder: Path, place: Options) -> None:
    model = open_converted(converted(folder, GENAI, place), threads=1)
    clean = model.decoder(capacity=64).prefill(FED)[0]
    np.testing.assert_array_equal(fed(model, None, capacity=64)[0], clean)


def test_two_threads_share_a_session(folder: Path) -> None:
    model = open_converted(converted(folder, GENAI), threads=1)
    texts = [TEXT[None, start : start + 40] % 61 for start in range(0, 80, 10)]

    def last(text: np.ndarray) -> np.ndarray:
        return model.decoder(capacity=48).prefill(text, chunk=7)[0, -1]

    alone = [last(text) for text in texts]
    with ThreadPoolExecutor(2) as pool:
        np.testing.assert_array_equal(list(pool.map(last, texts)), alone)


def window_error(folder: Path, model: str) -> tuple[float, float]:
    """How far the logits are from the original's, without and with a window."""
    wanted = open_model(original(model), threads=1).decoder().prefill(FED)[0]
    errors = []
    for options in (Options(), Options(residual_length=60)):
        given, _ = fed(open_converted(converted(folder, model, options), threads=1), None)
        errors.append(float(np.abs(given - wanted).max() / np.abs(wanted).max()))
    return errors[0], errors[1]


def test_all_in_the_window_is_the_original_in_float16(folder: Path) -> None:
    without, inside = window_error(folder, DYNAMO)
    assert inside < 5e-3 < without


def test_a_target_without_kernels_refuses() -> None:
    with pytest.raises(UsageError, match=r"web has no graph for exact tokens"):
        prepare(original(DYNAMO), options=WINDOW, target=target_of("web"))


def test_more_tokens_than_a_window_holds() -> None:
    with pytest.raises(UsageError, match="residual_length"):
        prepare(original(DYNAMO), options=Options(residual_length=4000, sink_tokens=97))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_of_our_own_have_one(preset: str) -> None:
    ours = preset in (
        *("int4", "int5", "int3", "int2", "k5v3", "k4v3", "k4v2", "signed4", "signed3"),
    )
    recognition = recognise(load(original(DYNAMO)).model)
    for options, expected in (
        (Options(), (32, 4) if ours else (0, 0)),
        (Options(residual_length=0), (0, 4) if ours else (0, 0)),
        (Options(sink_tokens=1), (32, 1) if ours else (0, 1)),
    ):
        plan = make_plan(recognition, PRESETS[preset], options)
        assert (plan.recent, plan.sinks) == (expected if preset != "raw" else (plan.recent, 0))


def test_a_target_without_kernels_has_none_by_default() -> None:
    plan = prepare(original(HALF), target=target_of("web")).plan
    assert (plan.recent, plan.sinks, plan.overlay_rows) == (0, 0, 0)


def test_on_ascend_presets_have_theirs() -> None:
    plan = prepare(original(HALF), target=target_of("cann", max_positions=64)).plan
    assert (plan.recent, plan.sinks) == (32, 4)
    assert plan.overlay_rows > 0


def test_no_window_is_what_it_was() -> None:
    plain = prepare(original(DYNAMO), options=Options(residual_length=0, sink_tokens=0))
    assert (plain.plan.recent, plain.plan.sinks, plain.plan.overlay_rows) == (0, 0, 0)
    nodes = [node for node in plain.loaded.model.graph if node.domain == "ai.turboquant"]
    assert not any({"recent", "sinks", "overlay_rows"} & {*node.attributes} for node in nodes)
