"""``verify`` of a graph of fixed sizes with standard operators: made again, and run.

Nothing in such a graph tells where a codec begins or ends. So the original is converted again in
memory, as the graph's plan says, with its operators and without: the graph must be the second to
the node and the weight, and compute what the first computes. What holds of the first is shown by
``verify`` of a conversion without a target.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir

from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import Prepared, prepare
from tq_onnx.conversion.target import CPU as NO_TARGET
from tq_onnx.conversion.target import Target
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.files.load import LoadedModel, load
from tq_onnx.measure import divergence
from tq_onnx.measure.greedy import compare_greedy, greedy_tokens
from tq_onnx.plan import Plan, plan_in
from tq_onnx.progress import OnProgress, Progress
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_converted
from tq_onnx.runtime.placement import report_placement
from tq_onnx.runtime.providers import CPU
from tq_onnx.runtime.session import make_session, ports
from tq_onnx.runtime.signature import signature_of
from tq_onnx.targets.registry import target_of
from tq_onnx.verification.baseline import Baseline
from tq_onnx.verification.checks import LEFT_OUT, PropertyCheck
from tq_onnx.verification.devices import (
    MAX_LOGIT_ERROR,
    MAX_RELATIVE_ERROR,
    ProviderFigures,
    compare_models,
    on_device,
    providers_agree,
)
from tq_onnx.verification.findings import Inputs, VerifyReport
from tq_onnx.verification.graph_equality import changed_tensors, is_same_graph
from tq_onnx.verification.interfaces import refuse_stranger

PROMPT_TOKENS: Final = 32


def verify_graph(
    baseline: Baseline,
    converted: LoadedModel,
    plan: Plan,
    inputs: Inputs,
    *,
    source: str,
    tell: OnProgress,
) -> VerifyReport:
    """Compare a graph of fixed sizes with its original.

    Args:
        baseline: the original.
        converted: the graph; one for pieces of prompts beside it is taken along.
        plan: its plan.
        inputs: what both read; the graph has no kernels of the library.
        source: where the tokens come from, for the report.
        tell: called as each step begins.

    Raises:
        VerificationError: the graph was not made from this original.
        UnsupportedModelError: its conversion cannot be made again from its plan.
        TqOnnxError: a model is refused.
    """
    before, text, ep, threads = baseline.opened, inputs.text, inputs.ep, inputs.threads
    refuse_stranger(before, converted.path, converted)
    on_cpu = open_converted(converted.path, loaded=converted, threads=threads)
    after = on_cpu if ep is CPU else open_converted(converted.path, threads=threads, ep=ep)
    room = on_cpu.signature.slots or 0
    prompt = text[: min(PROMPT_TOKENS, len(text), room // 2)]
    new_tokens = min(inputs.new_tokens, room - len(prompt))
    tell(Progress("Converting the original again"))
    found, reference = _made_again(baseline.path, plan, on_cpu, threads)
    tell(Progress("Comparing the graph with its conversion"))
    found.append(_computes(compare_models(reference, on_cpu, prompt, new_tokens=new_tokens)))
    figures = greedy = None
    if not inputs.quick:
        figures = divergence.compare(
            before.decoder(),
            after.decoder(),
            text,
            vocabulary=before.vocabulary,
            context=min(inputs.context, len(text), room),
            stride=max(1, min(inputs.context, room) // 2),
            on_progress=tell,
        )
        tell(Progress("Continuing a prompt with both models"))
        own, other = (
            greedy_tokens(model.decoder(), prompt.tolist(), new_tokens) for model in (before, after)
        )
        noise = figures.logit_rms_difference
        greedy = compare_greedy(before.decoder(), prompt.tolist(), own, other, noise)
    nodes = report_placement(after.session, converted.model)
    device = None
    if ep.has_own_memory:
        tell(Progress(f"Comparing {ep.provider} with the CPU"))
        device = compare_models(on_cpu, after, prompt, new_tokens=new_tokens)
        found += [on_device(nodes), *providers_agree(device, plan.layers[0].dtype)]
    return VerifyReport(
        original=baseline.path,
        converted=converted.path,
        source=source,
        tokens=len(prompt if inputs.quick else text),
        kernels=False,
        checks=tuple(found),
        quality=figures,
        greedy=greedy,
        placement=nodes,
        device=device,
        left_out=LEFT_OUT[:1] if inputs.quick else (),
    )


def _made_again(
    original: Path, plan: Plan, graph: OpenModel, threads: int | None
) -> tuple[list[PropertyCheck], OpenModel]:
    """Return checks that graphs are their conversion, and that with operators, opened."""
    checks = []
    for model in (graph, graph.wide):
        if model is None:
            continue
        loaded = load(model.path)
        own = plan_in(loaded.model.metadata_props)
        assert own is not None  # it was opened
        target = target_of(
            plan.target, capacity=model.signature.slots, call_tokens=_tokens_of(model)
        )
        again = _conversion(original, own, target)
        if replace(again.plan, tool_version=own.tool_version) != own:
            raise UnsupportedModelError(
                "the conversion cannot be made again from the plan alone, as with `calibration` "
                "or with other options than preset, rotation, seed and sizes",
                where=str(model.path),
                fix="verify the same conversion without `target`",
            )
        changed = changed_tensors(loaded.model, again.loaded.model)
        if not changed and not is_same_graph(loaded.model, again.loaded.model):
            changed = ["nodes are others"]
        detail = "; ".join(changed[:4]) or f"{len(loaded.model.graph)} nodes"
        name = f"{model.path.name} is the conversion of the original"
        checks.append(PropertyCheck(name, not changed, detail))
    prepared = _conversion(original, plan, NO_TARGET)
    session = make_session(
        ir.to_proto(prepared.loaded.model).SerializeToString(),
        library=False,
        threads=threads,
        external_data=prepared.loaded.path.parent,
        memory_reuse=False,
    )
    return checks, OpenModel(original, session, signature_of(session, prepared.plan))


def _conversion(original: Path, plan: Plan, target: Target) -> Prepared:
    options = Options(
        rotation=plan.rotation, seed=plan.seed, gains=False, residual_length=0, sink_tokens=0
    )
    return prepare(original, preset=plan.preset, options=options, target=target)


def _tokens_of(model: OpenModel) -> Any:
    """Return the tokens of a call, which are in the types of the graph."""
    inputs, _ = ports(model.session)
    return next(port.shape[1] for port in inputs if port.name == model.signature.interface.tokens)


def _computes(figures: ProviderFigures) -> PropertyCheck:
    """Check that fixed sizes and other operators change nothing."""
    limit = MAX_LOGIT_ERROR * max(1.0, figures.largest_logit)
    later, relative = figures.later_logit_error, MAX_RELATIVE_ERROR * figures.largest_logit
    holds = figures.logit_error <= limit and (later is None or later <= relative)
    return PropertyCheck(
        "the graph computes what its conversion with operators does",
        holds and figures.same_tokens == figures.new_tokens,
        f"largest difference of a logit {figures.logit_error:.1e}, {limit:.1e} allowed; the same "
        f"{figures.same_tokens} of {figures.new_tokens} greedy tokens; {figures.bytes_differing} "
        f"of {figures.cache_bytes} cache bytes differ",
    )
