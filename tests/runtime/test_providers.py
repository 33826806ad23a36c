"""Execution providers as the CPU's ONNX Runtime sees them; with the other one: ``tests/cann``."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

from tests.runtime.models import DYNAMO, converted, original
from tq_onnx.errors import LibraryError, UnsupportedModelError, UsageError
from tq_onnx.runtime import errors
from tq_onnx.runtime import session as sessions
from tq_onnx.runtime.opening import open_model
from tq_onnx.runtime.placement import (
    PlacementReport,
    open_placed,
    problem_of,
    refuse_misplaced,
    report_placement,
    try_provider,
)
from tq_onnx.runtime.providers import CANN, CPU, PROVIDERS, provider_of
from tq_onnx.runtime.session import make_session, placement
from tq_onnx.targets.registry import TARGETS

RECORDED = pytest.mark.skipif(
    not sessions._HAS_RECORD, reason="this ONNX Runtime keeps no record of node placement"
)
WITHOUT_CANN = pytest.mark.skipif(
    CANN.provider in onnxruntime.get_available_providers(), reason="the wheel has the provider"
)


def test_providers_are_targets_of_conversions() -> None:
    assert tuple(PROVIDERS) == tuple(TARGETS)[: len(PROVIDERS)]
    assert {target.provider for target in TARGETS.values()} == set(PROVIDERS)


@WITHOUT_CANN
def test_a_wheel_without_the_provider() -> None:
    with pytest.raises(LibraryError) as caught:
        make_session(original(DYNAMO), library=False, ep=CANN)
    assert str(caught.value) == (
        f"this onnxruntime {onnxruntime.__version__} has no CANNExecutionProvider, only "
        f"{', '.join(onnxruntime.get_available_providers())}; install onnxruntime-cann in an "
        "environment of its own"
    )


def test_a_wheel_that_does_not_tell_where_nodes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "absent", lambda _: None)
    monkeypatch.setattr(sessions, "_HAS_RECORD", False)
    with pytest.raises(LibraryError, match=r"keeps no record .* onnxruntime-cann 1\.24 or newer"):
        make_session(original(DYNAMO), library=False, ep=CANN)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "[ONNXRuntimeError] : 1 : FAIL : create CANN ExecutionProvider fail",
            "cannot load its CANNExecutionProvider; install the libraries and the device that "
            "onnxruntime-cann needs",
        ),
        (
            "CANN failure 507033: ACL_ERROR_RT_DEV_SETUP_ERROR; expr=aclrtSetDevice(id)",
            "m.onnx: CANNExecutionProvider does not work here: CANN failure 507033: ACL_ERROR_RT",
        ),
        ("anything else", 'refuses the graph: anything else; convert the original with `target="'),
    ],
)
def test_what_is_said_of_errors(message: str, told: str) -> None:
    error = errors.load_error(RuntimeError(message), "m.onnx", CANN)
    assert told in str(error)
    assert error.exit_code == (3 if "anything" in message else 4)


def test_bodies_are_for_the_cpu() -> None:
    with pytest.raises(UsageError, match="leave out `ep`"):
        open_model(converted(DYNAMO), library=False, ep=CANN)


@RECORDED
def test_the_cpu_runs_everything() -> None:
    session = make_session(converted(DYNAMO), threads=1)
    assert provider_of(session) is CPU
    assigned = placement(session).assigned
    assert {node.provider for node in assigned} == {CPU.provider}
    assert sum(node.domain == "ai.turboquant" for node in assigned) == 6
    found = open_placed(converted(DYNAMO), CPU)
    assert (found.nodes, found.layers, found.elsewhere) == (len(assigned), 2, {})
    assert problem_of(found) is None
    assert str(try_provider(CPU)) == "1 of 1 nodes on CPUExecutionProvider"


MODEL = ir.from_proto(
    onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18, "ai.turboquant" : 1]>
        graph (float[N] x, uint8[N] past) => (float[N] y, uint8[N] present) {
            [scaled] s = Abs(x)
            [sized] size = Shape(past)
            [numbered] size2 = Shape(x)
            [flagged] flags = IsNaN(s)
            [own] present = ai.turboquant.Unknown(past)
            [chosen] y = Where(flags, s, x)
        }"""
    )
)


def session_of(nodes: Sequence[tuple[str, str, str]], provider: str = CANN.provider) -> Any:
    """A session of two providers that tells these names, operators and providers."""
    record = [
        SimpleNamespace(
            ep_name=where,
            get_nodes=lambda name=name, op=op: [SimpleNamespace(name=name, op_type=op, domain="")],
        )
        for name, op, where in nodes
    ]
    return SimpleNamespace(
        get_providers=lambda: [provider, CPU.provider],
        get_provider_options=lambda: {CANN.provider: dict(CANN.options)},
        get_provider_graph_assignment_info=lambda: record,
    )


@RECORDED
@pytest.mark.parametrize(
    ("name", "op", "misplaced"),
    [
        ("scaled", "Abs", True),
        ("chosen", "Where", True),
        ("own", "Unknown", True),
        ("sized", "Shape", True),
        ("numbered", "Shape", False),
        ("flagged", "IsNaN", False),
        # Made by ONNX Runtime: of floats, unless all of this operator in the file are not.
        ("fused", "Gelu", True),
        ("fused", "IsNaN", False),
        ("fused", "Shape", True),
    ],
)
def test_what_belongs_on_the_device(name: str, op: str, misplaced: bool) -> None:
    session = session_of([(name, op, CPU.provider), ("scaled", "Abs", CANN.provider)])
    found = report_placement(session, MODEL)
    assert (found.nodes, found.on_provider, found.elsewhere) == (2, 1, {op: 1})
    assert bool(found.misplaced) == misplaced
    if misplaced:
        with pytest.raises(UnsupportedModelError) as caught:
            refuse_misplaced(session, MODEL, original(DYNAMO))
        assert str(caught.value) == (
            f"{original(DYNAMO)}: node {name} ({op}) runs on CPUExecutionProvider; convert the "
            'original with `target="cann"`'
        )
    else:
        refuse_misplaced(session, MODEL, original(DYNAMO))


def test_converted_layers_without_kernels_are_a_problem() -> None:
    report = PlacementReport(CPU.provider, 9, 9, {}, (), encode=0, attention=1, layers=2)
    assert problem_of(report) == (
        "0 TurboQuantEncode and 1 TurboQuantDequantAttention nodes of 2 layers run on kernels"
    )


def test_a_report_without_a_record_says_so() -> None:
    report = PlacementReport(CPU.provider, 0, 0, {}, (), encode=4, attention=2, layers=2)
    assert problem_of(report) is None
    assert str(report) == "CPUExecutionProvider; this onnxruntime keeps no record of nodes"


def test_many_misplaced_nodes_are_counted() -> None:
    session = session_of([("scaled", "Abs", CPU.provider), ("chosen", "Where", CPU.provider)])
    if sessions._HAS_RECORD:
        problem = problem_of(report_placement(session, MODEL))
        assert problem == "node scaled (Abs) runs on CPUExecutionProvider (and 1 more node)"
