"""Whole models on the device: placement, the CPU's logits and tokens, caches, times."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.ascend.targets import CANN
from tq_onnx.ascend.verification.anonymise import anonymise
from tq_onnx.ascend.verification.findings import Figures, Findings
from tq_onnx.codec.acceptance import FIELD_STEPS
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import located
from tq_onnx.files.load import load
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.plan import plan_in
from tq_onnx.runtime import providers
from tq_onnx.runtime.opening import open_converted
from tq_onnx.runtime.placement import open_placed, problem_of
from tq_onnx.runtime.providers import ExecutionProvider
from tq_onnx.speed.timing import measure
from tq_onnx.targets.registry import target_of_plan
from tq_onnx.verification.devices import (
    MAX_RELATIVE_ERROR,
    ProviderFigures,
    compare_providers,
)

Tokens = npt.NDArray[np.int64]

LOGIT_ERROR: Final = 1e-4
"""Largest error of a logit, relative to the largest logit where that is more than 1; where CANN's
attention reads planes, with queries and sums of float16, ``MAX_RELATIVE_ERROR``."""

_PROMPT: Final = 24


def for_cann(model: Path, folder: Path) -> Path:
    """Return a model that is for CANN already; convert any other into the folder."""
    with located(model):
        plan = plan_in(load(model).model.metadata_props)
    if plan is not None:
        with located(model):
            made_for = target_of_plan(plan)
        if made_for.provider == CANN.provider:
            return model
    output = folder / f"{model.stem}.cann.onnx"
    convert(model, output, preset=CANN.default_preset, target=CANN)
    return output


def check_model(findings: Findings, name: str, model: Path, prompt: Tokens | None = None) -> None:
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
        f"the CPU's greedy tokens, logits within {_error_allowed(model)}, no wrong byte in the "
        "caches",
    )
    _time(findings, name, model, providers.CANN, findings.effort.context)


def _placed(model: Path) -> tuple[bool, Figures]:
    report = open_placed(model, providers.CANN)
    problem = problem_of(report)
    figures: Figures = {
        "nodes": report.nodes,
        "on_cann": report.on_provider,
        "elsewhere": dict(report.elsewhere),
        "problem": None if problem is None else anonymise(problem),
    }
    return problem is None, figures


def _compared(findings: Findings, model: Path, prompt: Tokens | None) -> tuple[bool, Figures]:
    prompt = np.arange(1, 1 + _PROMPT) if prompt is None else prompt
    probe, new_tokens = expose_internals(model), findings.effort.new_tokens
    figures = compare_providers(probe, prompt, new_tokens=new_tokens, ep=providers.CANN)
    return _judged(figures, _error_allowed(model))


def _error_allowed(model: Path) -> float:
    plan = plan_in(load(model).model.metadata_props)
    return MAX_RELATIVE_ERROR if plan is not None and plan.planes else LOGIT_ERROR


def _judged(figures: ProviderFigures, allowed: float) -> tuple[bool, Figures]:
    error, limit = figures.logit_error, allowed * max(1.0, figures.largest_logit)
    holds = (
        figures.same_tokens == figures.new_tokens
        and error <= limit
        and not figures.codes_wrong
        and figures.scale_steps <= FIELD_STEPS
    )
    return holds, {**asdict(figures), "limit": limit}


def _time(findings: Findings, name: str, model: Path, ep: ExecutionProvider, context: int) -> None:
    steps, prompts = findings.effort.steps, list[float]()

    def run() -> list[float]:
        opened = open_converted(model, ep=ep)
        (speed,) = measure([opened], context, tokens=steps, prompt=True, pause=False)
        prompts.append(speed.first_token_seconds or 0.0)
        return [speed.step_seconds]

    findings.time(f"{name}: a step of decode after {context} tokens", run)
    if prompts:
        findings.time(f"{name}: a prompt of {context} tokens", lambda: prompts)
