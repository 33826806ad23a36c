"""The layers of a converted model against its plan, and its plan against the original."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir

from tq_onnx.codec.rotation import rotation_seed
from tq_onnx.codec.spec import is_layout_of
from tq_onnx.conversion.bake import bake_functions
from tq_onnx.conversion.checknodes import layer_violations
from tq_onnx.conversion.layers import (
    converted_layers,
)
from tq_onnx.errors import UnsupportedModelError, VerificationError
from tq_onnx.plan import (
    CPU,
    METADATA_DIGEST,
    METADATA_PRESET,
    METADATA_VERSION,
    ROLES,
    LayerPlan,
    Plan,
)
from tq_onnx.targets.registry import target_of_plan
from tq_onnx.verification.graph_equality import is_same_body
from tq_onnx.version import __version__

_CODECS: Final = frozenset(
    (
        *("codec", "row_bytes", "feedback", "rotary"),
        *("rotation_seed", "centered", "has_padding", "equalised", "adaptation", "dialect"),
    )
)
"""What a conversion chooses for a layer; all else is the original's."""

_LOWERED: Final = frozenset({"has_bias", "causal", "sliding_window"})
"""What a target may change: a causal mask becomes the operator's, with its window."""


def expect_layers(path: Path, model: ir.Model, plan: Plan | None) -> None:
    """Refuse a converted model without the operators that its plan promises."""
    target = None if plan is None else target_of_plan(plan)
    if plan is None or target is None or not target.has_operators:
        return
    try:
        converted_layers(model, plan)
    except UnsupportedModelError as error:
        raise VerificationError(error.what, where=str(path), fix=error.fix) from error


def plan_problems(model: ir.Model, plan: Plan, raw: Plan) -> list[str]:
    """Return what is not as the plan or the original says.

    Args:
        raw: the plan of the original, converted with the codec ``raw``.
    """
    problems = _bodies(model, plan) if plan.tool_version == __version__ else []
    problems += _header(model, plan, raw)
    digest = model.metadata_props.get(METADATA_DIGEST)
    is_own_layout = is_layout_of(plan.layout_digest, plan.codecs, **plan.layout_facts)
    if digest != plan.layout_digest or not is_own_layout:
        problems.append("the layout digest is not that of this version")
    if len(plan.layers) != len(raw.layers):
        return [*problems, f"{len(raw.layers)} layers in the original, {len(plan.layers)} here"]
    chosen = _CODECS if plan.target == CPU else _CODECS | _LOWERED
    for layer, raw_layer in zip(plan.layers, raw.layers, strict=True):
        facts, raw_facts = _facts(layer), _facts(raw_layer)
        problems += [
            f"layer {layer.layer}: {name} is {facts[name]} in the plan and {value} in the original"
            for name, value in raw_facts.items()
            if name.split()[-1] not in chosen and facts[name] != value
        ]
    return [*problems, *layer_violations(model, plan)]


def _facts(layer: LayerPlan) -> dict[str, Any]:
    """Return the facts of a layer by name, those of a cache behind what it holds."""
    facts = asdict(layer)
    for role in ROLES:
        facts |= {f"{role} {name}": value for name, value in facts.pop(role).items()}
    return facts


def _header(model: ir.Model, plan: Plan, raw: Plan) -> Iterator[str]:
    """Yield what the metadata or the original says otherwise than the plan, apart from layers."""
    written = model.metadata_props
    for key, value in ((METADATA_PRESET, plan.preset), (METADATA_VERSION, plan.tool_version)):
        if written.get(key, value) != value:
            yield f"{key} is {written[key][:40]!r}, and the plan says {value!r}"
    interface, raw_interface = plan.interface, raw.interface
    if plan.target != CPU:  # takes no padding, and may keep caches of one size
        interface, raw_interface = (
            replace(ports, padding=True, right_padding=False, static=False)
            for ports in (interface, raw_interface)
        )
    if interface != raw_interface:
        yield "the plan has other inputs and outputs than the original"
    if plan.fixed_capacity != raw.fixed_capacity and plan.target == CPU:
        yield f"the plan has fixed_capacity {plan.fixed_capacity}, not {raw.fixed_capacity}"
    for layer in plan.layers:
        if not any(codec.is_rotated for codec in layer.codecs):
            continue
        seed = rotation_seed(plan.rotation, layer.layer, plan.seed)
        if layer.rotation_seed != seed:
            yield f"layer {layer.layer}: rotation_seed is {layer.rotation_seed}, not {seed}"


def _bodies(model: ir.Model, plan: Plan) -> list[str]:
    """Name the function bodies that are not those of this version."""
    imports = dict(model.graph.opset_imports)
    expected = ir.Model(ir.Graph([], [], nodes=[], opset_imports=imports), ir_version=10)
    bake_functions(expected, plan)
    return [
        f"the function body of {identifier[1]} is not this version's"
        for identifier, body in expected.functions.items()
        if identifier not in model.functions or not is_same_body(model.functions[identifier], body)
    ]
