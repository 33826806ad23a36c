"""Whole models on the device: placement, the CPU's logits and tokens, caches, times; graph mode."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.ascend.graph_mode.passes import lower_for_graph_mode
from tq_onnx.ascend.targets import CANN as TARGET
from tq_onnx.ascend.verification.anonymise import anonymise
from tq_onnx.ascend.verification.findings import Figures, Findings
from tq_onnx.codec.acceptance import FIELD_STEPS
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import located
from tq_onnx.files.load import load
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.plan import Plan, plan_in
from tq_onnx.runtime.model import open_converted
from tq_onnx.runtime.placement import open_placed, problem_of
from tq_onnx.runtime.providers import CANN, CANN_GRAPH, CPU, ExecutionProvider
from tq_onnx.runtime.session import make_session, ports
from tq_onnx.speed.timing import measure
from tq_onnx.targets.registry import target_of_plan
from tq_onnx.verification.devices import compare_providers

Array = npt.NDArray[Any]

LOGIT_ERROR: Final = 1e-4
"""Largest error of a logit, relative to the largest logit where that is more than 1."""

_PROMPT: Final = 24
_GRAPH_CAPACITY: Final = 64
_GRAPH_STEPS: Final = 8


def for_cann(model: Path, folder: Path) -> Path:
    """Return a model that is for CANN already; convert any other into the folder."""
    with located(model):
        plan = plan_in(load(model).model.metadata_props)
    if plan is not None:
        with located(model):
            made_for = target_of_plan(plan)
        if made_for.provider == CANN.name:
            return model
    output = folder / f"{model.stem}.cann.onnx"
    convert(model, output, target=TARGET)
    return output


def check_model(findings: Findings, name: str, model: Path, prompt: Array | None = None) -> None:
    """Check one model on the device against the CPU, and time it.

    Args:
        findings: takes the checks.
        name: name of the model in the report.
        model: converted for CANN.
        prompt: token ids ``[n]``; made up by default.
    """
    findings.check(
        f"{name}: placement", lambda: _placed(model), "every floating-point node on CANN"
    )
    findings.check(
        f"{name}: decode",
        lambda: _compared(findings, model, prompt),
        f"the CPU's greedy tokens, logits within {LOGIT_ERROR}, no wrong byte in the caches",
    )
    _time(findings, name, model)


def _placed(model: Path) -> tuple[bool, Figures]:
    report = open_placed(model, CANN)
    problem = problem_of(report)
    figures: Figures = {
        "nodes": report.nodes,
        "on_cann": report.on_provider,
        "elsewhere": dict(report.elsewhere),
        "problem": None if problem is None else anonymise(problem),
    }
    return problem is None, figures


def _compared(findings: Findings, model: Path, prompt: Array | None) -> tuple[bool, Figures]:
    found = compare_providers(
        expose_internals(model),
        np.arange(1, 1 + _PROMPT) if prompt is None else prompt,
        new_tokens=findings.effort.new_tokens,
        ep=CANN,
    )
    limit = LOGIT_ERROR * max(1.0, found.largest_logit)
    holds = (
        found.same_tokens == found.new_tokens
        and found.logit_error <= limit
        and found.codes_wrong == 0
        and (found.scale_steps or 0) <= FIELD_STEPS
    )
    return holds, {**asdict(found), "limit": limit}


def _time(findings: Findings, name: str, model: Path) -> None:
    effort = findings.effort
    steps: list[float] = []
    prompts: list[float] = []

    def run() -> list[float]:
        opened = open_converted(model, ep=CANN)
        (found,) = measure([opened], effort.context, tokens=effort.steps, prompt=True, pause=False)
        prompts.append(found.first_token_seconds or 0.0)
        steps.append(found.fastest_step_seconds)
        return [found.step_seconds]

    findings.time(f"{name}: a step of decode after {effort.context} tokens", run)
    if prompts:
        findings.time(f"{name}: a prompt of {effort.context} tokens", lambda: prompts)


def check_graph_mode(findings: Findings, name: str, converted: Path, prompt: Array) -> None:
    """Check a model that is lowered to standard ONNX and compiled by CANN against the CPU."""
    findings.check(
        f"{name}: graph mode",
        lambda: _in_graph_mode(findings, name, converted, prompt),
        f"logits within {LOGIT_ERROR} of the CPU's, the same greedy tokens",
    )


def _in_graph_mode(
    findings: Findings, name: str, converted: Path, prompt: Array
) -> tuple[bool, Figures]:
    model = load(converted).model
    plan = lower_for_graph_mode(model, capacity=_GRAPH_CAPACITY)
    graph = ir.to_proto(model).SerializeToString()
    host = _Graph(graph, plan, CPU)
    begin = time.perf_counter()
    device = _Graph(graph, plan, CANN_GRAPH)
    error, largest, same, differing = 0.0, 0.0, 0, 0
    token = int(prompt[0])
    seconds: list[float] = []
    for place in range(min(len(prompt), _GRAPH_STEPS) + _GRAPH_STEPS):
        own, its = host.step(token), device.step(token)
        seconds.append(device.seconds)
        error = max(error, float(np.abs(its - own).max()))
        largest = max(largest, float(np.abs(own).max()))
        same += int(own.argmax() == its.argmax())
        token = int(prompt[place + 1] if place + 1 < _GRAPH_STEPS else own.argmax())
    for one, other in zip(host.caches.values(), device.caches.values(), strict=True):
        differing += int((one != other).sum())
    findings.time(f"{name}: graph mode, a step with copies of the caches", lambda: seconds[1:])
    limit = LOGIT_ERROR * max(1.0, largest)
    figures = {
        "nodes": len(model.graph),
        "steps": len(seconds),
        "same_tokens": same,
        "logit_error": error,
        "limit": limit,
        "cache_bytes_differing": differing,
        "seconds_to_the_first_logits": round(seconds[0] + device.opened - begin, 3),
    }
    return error <= limit and same == len(seconds), figures


class _Graph:
    """A lowered model that reads one token after the other."""

    def __init__(self, model: bytes, plan: Plan, ep: ExecutionProvider) -> None:
        self._session = make_session(model, library=False, ep=ep)
        self.opened = time.perf_counter()
        self._plan = plan
        inputs, outputs = ports(self._session)
        self._outputs = [port.name for port in outputs]
        self._shapes = {port.name: port.shape for port in inputs}
        self._pairs = {
            str(pair.past): pair.present for layer in plan.layers for pair in layer.caches
        }
        self.caches: dict[str, Array] = {
            past: np.zeros([int(str(size)) for size in self._shapes[past]], np.uint8)
            for past in self._pairs
        }
        self._length = 0
        self.seconds = 0.0

    def step(self, token: int) -> Array:
        """Feed one token; return its logits ``[vocabulary]``."""
        names = self._plan.interface
        mask = np.zeros((1, _GRAPH_CAPACITY), np.int64)
        mask[:, : self._length + 1] = 1
        given = {
            names.tokens: np.array([[token]]),
            names.attention_mask: mask,
            names.position_ids: np.array([[self._length]]),
        }
        feeds = {name: array for name, array in given.items() if name in self._shapes}
        begin = time.perf_counter()
        found = dict(
            zip(
                self._outputs,
                self._session.run(self._outputs, {**feeds, **self.caches}),
                strict=True,
            )
        )
        self.seconds = time.perf_counter() - begin
        self._length += 1
        self.caches = {past: found[present] for past, present in self._pairs.items()}
        logits: Array = found[names.logits][0, -1].astype(np.float64)
        return logits
