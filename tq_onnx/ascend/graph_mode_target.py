"""The target ``cann-graph``: one graph of fixed sizes that CANNExecutionProvider compiles.

What is imported inside of the functions takes onnx with it, and the command line reads this row for
its help.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tq_onnx.conversion.target import (
    PROMPT_FILE,
    STEP_FILE,
    Lowering,
    Target,
    TargetOption,
    Values,
    refuse_sharing,
    refuse_window,
)
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.plan import Plan

DEFAULT_CAPACITY: Final = 1024
"""Of caches whose size is in the graph; every step copies and reads all of it."""


PROMPT_TOKENS: Final = 128
"""Of a call of the graph for prompts, in a folder with two."""


def _refuse(plan: Plan) -> None:
    if plan.has_matrices:  # nobody has seen what they cost without a search and a window
        raise UnsupportedModelError(
            f"the target cann-graph has no graph for the preset {plan.preset}, whose rows have two "
            "classes of coordinates",
            fix="use --preset int3, or leave out --target cann-graph",
        )
    refuse_window(plan)
    refuse_sharing(plan)


def _lower(plan: Plan, path: Path, values: Values) -> Lowering:
    from tq_onnx.ascend.graph_mode.passes import lowering_of

    capacity, tokens = values["capacity"], values["call_tokens"]
    assert capacity is not None
    assert tokens is not None  # both have defaults
    return lowering_of(plan, capacity=capacity, tokens=tokens)


CANN_GRAPH: Final = Target(
    name="cann-graph",
    help="standard operators and fixed sizes, for the provider's graph mode; see docs/ascend.md",
    summary="one graph of fixed sizes for CANNExecutionProvider (docs/ascend.md)",
    example="--target cann-graph --capacity 2048 -o graphs/",
    options=(
        TargetOption("capacity", "cache slots.", default=DEFAULT_CAPACITY),
        TargetOption(
            "call_tokens",
            "tokens a call.",
            default=1,
        ),
    ),
    refuse=_refuse,
    lower=_lower,
    provider="cann-graph",
    searches=False,
    has_windows=False,
    has_operators=False,
    has_fixed_sizes=True,
    has_weights=True,
    files={STEP_FILE: {"call_tokens": 1}, PROMPT_FILE: {"call_tokens": PROMPT_TOKENS}},
    no_folders="graphs for CANN are made of one decoder, and no runtime of folders runs them",
)
