"""The lane of random graphs: a conversion computes what the graph computes, or it is refused."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoders.random_attention import concatenated
from tests.decoders.random_graphs import RandomGraph
from tests.decoders.random_operators import fused
from tests.fuzz.commands import Case
from tests.recognise.test_random_graphs import RELAXED
from tests.recognise.test_random_graphs import check as compare

BYTES = 4096
"""More than the choices of any graph take."""


def check(draw: random.Random, folder: Path) -> Case:
    """Builds a graph of random bytes, converts it and compares both."""
    case = Case(folder)
    made: list[RandomGraph] = []

    @settings(database=None, deadline=None, suppress_health_check=RELAXED)
    @given(st.one_of(concatenated(), concatenated(), fused()))
    def one(graph: RandomGraph) -> None:
        made.append(graph)
        case.outcomes["graph"] = compare(graph)

    try:
        if one.hypothesis.fuzz_one_input(draw.randbytes(BYTES)) is None:
            case.outcomes["graph"] = "no graph"
    except AssertionError as error:
        case.outcomes["graph"] = "wrong"
        case.broken("wrong", str(error))
    case.what = repr(made[-1]) if made and case.problems else ""
    return case


def warm() -> None:
    """Nothing is shared."""
