"""All targets, one row each: the module and the name of its record.

A row is text, so that a target may be in a room above this one, which may import all others.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from tq_onnx.conversion.target import Target
from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.plan import Plan

ROWS: Final = (
    "tq_onnx.conversion.target:CPU",
    "tq_onnx.ascend.targets:CANN",
    "tq_onnx.targets.web.target:WEB",
    "tq_onnx.targets.paged.target:TARGET",
)


def _targets() -> Mapping[str, Target]:
    targets = {}
    for row in ROWS:
        target = pkgutil.resolve_name(row)
        assert isinstance(target, Target), row
        targets[target.name] = target
    return MappingProxyType(targets)


TARGETS: Final = _targets()


def target_of(name: str, **values: Any) -> Target:
    """Return the target of that name, with values of its options."""
    name = name if isinstance(name, str) else type(name).__name__  # callers may give anything
    if name not in TARGETS:
        raise UsageError(f"target {name!r} is not one of {', '.join(TARGETS)}")
    target = TARGETS[name]
    for value, setting in values.items():
        owners = [
            target.name
            for target in TARGETS.values()
            if any(option.name == value for option in target.options)
        ]
        if not owners:
            raise UsageError(f"no target has the option {value}")
        if setting is not None and name not in owners:
            names = " or ".join(f'`target="{owner}"`' for owner in owners)
            raise UsageError(
                f"`{value}` is an option that only a model for {names} has",
                fix=f"give {names}, or leave `{value}` out",
            )
    return target.having(**{key: setting for key, setting in values.items() if setting is not None})


def target_of_plan(plan: Plan) -> Target:
    """Return the target that a model was converted for."""
    if plan.target not in TARGETS:
        raise ModelFileError(
            f"the model was converted for {plan.target!r}, and the targets of this version are "
            f"{', '.join(TARGETS)}",
            fix=f"use the version that converted it, {plan.tool_version}",
        )
    return TARGETS[plan.target]
