"""Calls of one operator on the device, one or several of them in a run, and the time of one.

A run of a session costs time of its own on the host. What one more call of the same run adds is
therefore what is timed: the launches of the call, and its work on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import numpy.typing as npt
import onnx

from tq_onnx.ascend.verification.findings import Effort
from tq_onnx.runtime.io_binding import BoundModel
from tq_onnx.runtime.providers import CANN
from tq_onnx.runtime.session import make_session

Array = npt.NDArray[Any]

_WAKE: Final = 3


def bind(
    model: bytes,
    inputs: Mapping[str, Array],
    where: str,
    *,
    on_host: Collection[str] = (),
    in_place: Mapping[str, str] | None = None,
    calls: int = 1,
) -> BoundModel:
    """Return a model of one operator, called once or more often, ready to run on the device.

    Args:
        model: as ``single_operator`` makes it.
        inputs: of one call.
        where: what errors call it.
        on_host: names of inputs that the operator reads on the host; all calls share them.
        in_place: names of outputs that are written over an input, and of that input.
        calls: how many there are in a run; names of all but the first have a number.
    """
    names = {name: [_numbered(name, call) for call in range(calls)] for name in inputs}
    arrays = {
        each: array
        for name, array in inputs.items()
        for each in ([name] if name in on_host else names[name])
    }
    shared = {
        _numbered(output, call): _numbered(source, call)
        for output, source in (in_place or {}).items()
        for call in range(calls)
    }
    session = make_session(_repeated(model, calls, on_host), ep=CANN)
    return BoundModel(session, arrays, on_host=on_host, in_place=shared, where=where)


def seconds_of_a_call(bound: Callable[[int], BoundModel], effort: Effort) -> list[float]:
    """Return what one call adds to a run, for as many runs as the effort has.

    Args:
        bound: makes the model of so many calls; each has arrays of its own, so that no cache of the
            device holds those of all.
        effort: the amount of work.
    """
    single, several = (
        bound(calls).seconds(effort.runs, _WAKE) for calls in (1, 1 + effort.more_calls)
    )
    pairs = zip(sorted(single), sorted(several), strict=True)
    return [max(0.0, long - short) / effort.more_calls for short, long in pairs]


def _numbered(name: str, call: int) -> str:
    return name if call == 0 else f"{name}_{call}"


def _repeated(model: bytes, calls: int, on_host: Collection[str]) -> bytes:
    """Return the model with its node so many times, each with inputs and outputs of its own."""
    proto = onnx.load_from_string(model)
    graph = proto.graph
    (node,) = graph.node
    inputs = [value for value in graph.input if value.name not in on_host]
    numbered = {value.name for value in (*inputs, *graph.output)}
    values = [(graph.input, value) for value in inputs]
    values += [(graph.output, value) for value in list(graph.output)]
    for call in range(1, calls):
        for section, value in values:
            section.add().CopyFrom(value)
            section[-1].name = _numbered(value.name, call)
        copy = graph.node.add()
        copy.CopyFrom(node)
        copy.name = _numbered(node.name, call)
        for edges in (copy.input, copy.output):
            edges[:] = [_numbered(name, call) if name in numbered else name for name in edges]
    return bytes(proto.SerializeToString())
