"""A target as the conversion sees it: what a model is made for.

A target is a folder in ``tq_onnx.targets`` and a row in ``tq_onnx.targets.registry``. The row is a
``Target``: its options, what it takes, the passes that rewrite a converted model for it, and the
facts that the rest of the product asks for. Nothing outside of the folder names a target. This
module imports neither onnx nor onnx-ir, so that the command line can read the rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from tq_onnx import plan as plans
from tq_onnx.codec.presets import DEFAULT_PRESET
from tq_onnx.conversion.capabilities import Capabilities
from tq_onnx.errors import UsageError

if TYPE_CHECKING:
    import onnx_ir as ir

    from tq_onnx.plan import Plan


MOST: Final = 2**31 - 1
"""Of an option of a target: more tokens, pages or requests than any model has."""


@dataclass(frozen=True)
class TargetOption:
    """A number that only models for some target have."""

    name: str  #: as a keyword argument
    help: str  #: one sentence for the command line
    #: None where the target finds a value by itself; ``help`` says which then
    default: int | None = None
    least: int = 1  #: the smallest value
    for_folders: bool = False  #: whether only the configuration of a folder has it

    def check(self, value: object, target: str) -> None:
        """Refuse what is no value of the option."""
        where = f"target {target}"
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not (is_number and self.least <= value <= MOST):  # type: ignore[operator]
            raise UsageError(
                f"{self.name} must be a number from {self.least} to {MOST}, got {value!r}",
                where=where,
            )


@dataclass(frozen=True)
class Lowering:
    """The changes of a target to one converted model."""

    plan: Plan  #: the plan of the model that the passes leave
    passes: tuple[ir.passes.InPlacePass, ...]  #: run in this order on a clone of the model
    #: returns the plan once the passes have run, where they find out more; None for ``plan``
    found: Callable[[], Plan] | None = None

    @property
    def plan_behind(self) -> Plan:
        """The plan of the model, once the passes have run."""
        return self.plan if self.found is None else self.found()


Values = Mapping[str, Any]
"""Values of a target's options, by name."""


@dataclass(frozen=True)
class Target:
    """One row of the registry."""

    name: str  #: as users name it, and as plans do
    help: str = ""  #: what its models are for, a sentence without a capital; empty for nothing
    summary: str = ""  #: what a model for it is, for one line of a report; empty for nothing
    #: further arguments of ``convert`` in an example
    example: Values = field(default_factory=lambda: MappingProxyType({}))
    options: tuple[TargetOption, ...] = ()  #: what only its models have
    #: what it takes; a plan with anything else is refused
    capabilities: Capabilities = field(default_factory=Capabilities)
    #: makes the passes from the plan, the path of the original and the values of the options; None
    #: for a target that takes the converted model as it is
    lower: Callable[[Plan, Path, Values], Lowering] | None = None
    #: name of the execution provider that runs it, see ``tq_onnx.runtime.providers``
    provider: str = plans.CPU
    exposes_views: bool = True  #: whether views of an inner value are exposed in the value's place
    #: makes the TurboQuant operators again, in memory, in a model that has standard ones in their
    #: places; None where its models have them
    restore: Callable[[ir.Model, Plan], ir.Model] | None = None
    in_pages: bool = False  #: whether caches lie in pages, and exact tokens with them
    default_preset: str = DEFAULT_PRESET  #: of its models
    #: of the options; see ``having``
    values: Values = field(default_factory=lambda: MappingProxyType({}))

    @property
    def has_operators(self) -> bool:
        """Whether TurboQuant operators are in its models, and not standard ones in their places."""
        return self.restore is None

    def having(self, **values: Any) -> Target:
        """Return the target with values of its options."""
        known = {option.name: option for option in self.options}
        for name, value in values.items():
            if name not in known:
                raise UsageError(f"a model for the target {self.name} has no {name}")
            known[name].check(value, self.name)
        return replace(self, values=MappingProxyType({**self.values, **values}))

    def expect_file(self) -> None:
        """Refuse values that only a folder has a place for."""
        for option in self.options:
            if option.for_folders and self.values.get(option.name) is not None:
                raise UsageError(
                    f"`{option.name}` goes into the configuration of a folder, and this is one "
                    "file",
                    fix=f"leave `{option.name}` out, or convert a folder of onnxruntime-genai",
                )

    def lowering(self, plan: Plan, path: Path) -> Lowering | None:
        """Return what is to be done to a converted model; None for nothing."""
        defaults = {option.name: option.default for option in self.options}
        values: Values = {**defaults, **self.values}
        return None if self.lower is None else self.lower(plan, path, values)

    def kind(self, preset: str) -> str:
        """Return the kind of a conversion, as the names of its outputs have it."""
        return preset if self.lower is None else f"{preset}-{self.name}"


CPU: Final = Target(plans.CPU)
"""Takes converted models as they are."""
