"""The converted file without the library: checker, reference evaluator, plain onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from tests.trained.conftest import Pairs
from tests.trained.pair import Pair
from tq_onnx.codec.acceptance import FIELD_STEPS
from tq_onnx.codec.bitpack import unpack
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.integrations.bundled import ROUTES
from tq_onnx.measure.feeding_modes import all_caches
from tq_onnx.ops.schema import registered
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_converted
from tq_onnx.runtime.session import placement

Array = npt.NDArray[Any]

PROMPT = 12
#: Largest difference of a logit, over the largest logit.
MAX_LOGIT_ERROR = 1e-4
#: The same where a code, or the gain of a row, was a tie that fell the other way.
MAX_ERROR_OF_TIES = 3e-3
#: Share of the rows of which that may be so.
TIED_ROWS = 0.02


@dataclass(frozen=True, eq=False)
class Told:
    """What a backend makes of a prompt and one token more."""

    prompt_logits: Array
    step_logits: Array
    caches: list[Array]


def _onnxruntime(model: OpenModel, tokens: npt.NDArray[np.int64]) -> Told:
    decoder = model.decoder()
    prompt = decoder.prefill(tokens[None, :-1])
    step = decoder.prefill(tokens[None, -1:])
    return Told(prompt, step, all_caches(decoder))


def _reference_evaluator(pair: Pair, tokens: npt.NDArray[np.int64]) -> Told:
    model = onnx.load(pair.converted)
    evaluator = ReferenceEvaluator(model)
    names = pair.after.signature.interface
    caches = pair.after.signature.caches
    past = {c.pair.past: np.zeros((1, c.kv_num_heads, 0, c.row), np.uint8) for c in caches}
    logits: list[Any] = []
    for start, stop in ((0, len(tokens) - 1), (len(tokens) - 1, len(tokens))):
        feeds = {names.tokens: tokens[None, start:stop], **past}
        if names.attention_mask is not None:
            feeds[names.attention_mask] = np.ones((1, stop), np.int64)
        if names.position_ids is not None:
            feeds[names.position_ids] = np.arange(start, stop)[None]
        outputs = [names.logits, *(c.pair.present for c in caches)]
        found, *present = evaluator.run(outputs, feeds)
        past = {c.pair.past: rows for c, rows in zip(caches, present, strict=True)}
        logits.append(found)
    assert pair.after.plan is not None
    first = pair.after.plan.overlay_rows
    return Told(logits[0], logits[1], [rows[:, :, first:] for rows in past.values()])


def _agree(one: Told, other: Told) -> None:
    alike = all(np.array_equal(a, b) for a, b in zip(one.caches, other.caches, strict=True))
    limit = MAX_LOGIT_ERROR if alike else MAX_ERROR_OF_TIES
    for found, wanted in (
        (one.prompt_logits, other.prompt_logits),
        (one.step_logits, other.step_logits),
    ):
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= limit * np.abs(wanted).max()
    layout = row_layout(Codec(LLOYD_MAX, 4), 128)
    steps = []
    for rows, expected in zip(one.caches, other.caches, strict=True):
        assert rows.dtype == expected.dtype == np.uint8
        assert rows.shape == expected.shape == (1, 2, PROMPT + 1, 66)
        codes = [unpack(part, layout).astype(np.int64) for part in (rows, expected)]
        steps.append(np.abs(codes[0] - codes[1]))
        scales = [
            np.ascontiguousarray(part[..., layout.code_bytes :]).view("<i2").astype(np.int64)
            for part in (rows, expected)
        ]
        same = ~steps[-1].any(axis=-1)
        assert np.abs(scales[0] - scales[1])[same].max() <= FIELD_STEPS
    flips = np.concatenate(steps, axis=None)
    assert flips.max() <= 1
    # A row whose gains are worth the same may have the codes of either.
    rows = sum(np.count_nonzero(one.any(axis=-1)) for one in steps)
    assert rows <= max(2, TIED_ROWS * flips.size / 128), rows


def test_the_checker_accepts_it_with_the_schemas_registered(pairs: Pairs) -> None:
    with registered():
        onnx.checker.check_model(str(pairs("dynamo").converted), full_check=True)


def test_the_checker_finds_what_the_schemas_forbid(pairs: Pairs) -> None:
    model = onnx.load(pairs("dynamo").converted, load_external_data=True)
    node = next(node for node in model.graph.node if node.op_type == "TurboQuantEncode")
    del node.attribute[:]
    with registered(), pytest.raises(onnx.checker.ValidationError, match="Required attribute"):
        onnx.checker.check_model(model, full_check=True)


def test_the_reference_evaluator_runs_it(pairs: Pairs) -> None:
    pair = pairs("dynamo")
    tokens = pair.heldout[: PROMPT + 1]
    bodies = open_converted(pair.converted, library=False, threads=2)
    assert not placement(bodies.session).uses_library
    _agree(_reference_evaluator(pair, tokens), _onnxruntime(bodies, tokens))


@pytest.mark.parametrize("route", ROUTES)
def test_onnxruntime_runs_it_without_the_library(pairs: Pairs, route: str) -> None:
    pair = pairs(route)
    tokens = pair.heldout[: PROMPT + 1]
    bodies = open_converted(pair.converted, library=False, threads=2)
    where = placement(bodies.session)
    assert where.nodes > 0 and not where.uses_library
    kernels = open_converted(pair.converted, threads=2, exact=True)
    runs = placement(kernels.session)
    assert (runs.encode, runs.attention) == (8, 4)
    _agree(_onnxruntime(bodies, tokens), _onnxruntime(kernels, tokens))
