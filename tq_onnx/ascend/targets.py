"""The row of the target for Ascend, ``cann``.

What is imported inside of the functions takes onnx with it, and the command line reads the row for
its help.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tq_onnx.ascend.features import CAPABILITIES
from tq_onnx.conversion.target import Lowering, Target, TargetOption, Values
from tq_onnx.errors import UsageError
from tq_onnx.plan import Plan

DEFAULT_POSITIONS: Final = 32_768
MOST_POSITIONS: Final = 1 << 20
"""The tables of a head size of 128 are 512 MiB then."""


def _lower(plan: Plan, path: Path, values: Values) -> Lowering:
    from tq_onnx.ascend.lowering.decoder import lowering_of

    return lowering_of(plan, _positions(path, values["max_positions"]))


def _positions(path: Path, chosen: int | None) -> int:
    """Return the rows of the rotary tables of a model file."""
    from tq_onnx.files.configuration import configured_positions

    if chosen is None:
        return min(configured_positions(path) or DEFAULT_POSITIONS, MOST_POSITIONS)
    if chosen > MOST_POSITIONS:
        raise UsageError(
            f"{chosen} positions are not between 1 and {MOST_POSITIONS:,}",
            fix="give the longest context that the model is to be used with",
        )
    return chosen


CANN: Final = Target(
    name="cann",
    help="Ascend NPUs, with every floating-point node on CANNExecutionProvider",
    summary="every floating-point node on CANNExecutionProvider",
    example={"max_positions": 8192},
    options=(
        TargetOption(
            "max_positions",
            "longest context in tokens, which sets the size of the rotary tables.  [default: "
            "max_position_embeddings of config.json beside MODEL, else 32768]",
        ),
    ),
    capabilities=CAPABILITIES,
    lower=_lower,
    provider="cann",
    # CANN's own attention reads its codes; our kernels add the exact tokens.
    default_preset="signed4",
    # The provider copies an output that shares its memory before it is computed.
    exposes_views=False,
)
