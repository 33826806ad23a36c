"""``tq-onnx inspect``: show the layers that convert finds in a model, or its past conversion."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from tq_onnx.api import converting
from tq_onnx.cli import flags, planned, terminal
from tq_onnx.codec.elements import ELEMENT_BITS, ELEMENTS
from tq_onnx.codec.presets import COMMON_PRESETS, PRESETS
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.measure.tables import HALF_BITS, TextTable
from tq_onnx.ops.features import number_ranges

if TYPE_CHECKING:
    from tq_onnx.conversion.equalise import LayerEqualisation
    from tq_onnx.conversion.reports import InspectionReport
    from tq_onnx.integrations.folderinspection import FolderInspection
    from tq_onnx.plan import LayerPlan, Plan


_PAIRS: Final = 12
"""Pairs that a line names."""


@click.command()
@click.argument("model", type=flags.FilePath())
@flags.all_presets
@flags.as_json
@click.pass_context
def inspect(ctx: click.Context, model: Path, show_all: bool, as_json: bool) -> None:
    """Show the attention layers of an original MODEL, or the conversion of a converted one.

    Reads MODEL. For an original, prints its attention layers and the cache bytes per token, now and
    with each preset. If the model has norms of queries and keys, also prints the noise that 4-bit
    keys would add to the attention scores. If the model cannot be converted, prints the reasons and
    exits with code 3.

    For a converted model, prints preset, seed, row layout and cache bytes.

    For a folder, prints this for each decoder, and the other files that `convert` would copy.

    \b
    Example:
      tq-onnx inspect model.onnx
      tq-onnx inspect qwen3-genai/
      tq-onnx inspect model.int4.onnx --json
    """
    from tq_onnx.integrations.folderinspection import FolderInspection

    with terminal.progress("Reading the graph") as on_progress:
        report = converting.inspect(model, on_progress=on_progress)
    if as_json:
        terminal.print_json(report)
    elif isinstance(report, FolderInspection):
        _print_folder(model, report, show_all=show_all)
    elif report.plan is not None:
        _print_converted(model, report)
    else:
        _print_original(model, report, show_all=show_all)
    if not (report.convertible or report.is_converted):
        ctx.exit(UnsupportedModelError.exit_code)


def _print_folder(folder: Path, report: FolderInspection, *, show_all: bool) -> None:
    for model in (*report.of_role("decoder"), *report.of_role("converted")):
        path = folder / model.name
        if model.report.plan is not None:
            _print_converted(path, model.report)
        else:
            _print_original(path, model.report, show_all=show_all, following=False)
    if report.is_converted:
        return
    components = [model.name for model in report.of_role("other")]
    rows = [
        (what, name)
        for what, names in (("carries", components), ("data", report.data))
        for name in names
    ]
    rows += [("carries", ", ".join(report.companions))] if report.companions else []
    rows += [("leaves out", f"{entry.name}: {entry.reason}") for entry in report.left_out]
    if rows:
        terminal.print_facts(rows)
    if report.convertible:
        terminal.print_line(f"next: tq-onnx convert {shlex.quote(str(folder))}")


def _print_converted(model: Path, report: InspectionReport) -> None:
    plan, size = report.plan, report.bytes_per_token
    assert plan is not None  # by the callers
    rows = (
        *planned.rows(plan, calibration=report.calibration),
        ("heads", _heads(plan.layers[0])),
        ("capacity", _caches(plan)),
        ("cache per token", f"{size:,} bytes" if size is not None else "unknown"),
        ("tq-onnx", plan.tool_version),
        ("row layout", plan.layout_digest),
    )
    terminal.print_facts(rows, title=f"{model}: converted")


def _caches(plan: Plan) -> str:
    if any(layer.key.past is None for layer in plan.layers):
        return "none taken: a graph for a first prompt"
    if plan.interface.static:
        return "fixed capacity"
    if plan.block_size:
        return f"pages of {plan.block_size} tokens"
    return "fixed capacity or growing" if plan.fixed_capacity else "growing"


def _heads(layer: LayerPlan) -> str:
    heads = f"{layer.num_heads} heads, {layer.kv_num_heads} KV heads"
    return f"{heads}, head size {layer.head_size}"


def _print_original(
    model: Path, report: InspectionReport, *, show_all: bool, following: bool = True
) -> None:
    terminal.print_line(f"{model}: opset {report.opset}")
    if report.layers:
        terminal.print_table(_layers(report))
    if report.states:
        names = ", ".join(report.states)
        terminal.print_line(f"states that are no caches and stay as they are: {names}")
    if report.key_bias:
        terminal.print_line(
            f"keys have biases of norm up to {report.key_bias:.0f}, which convert keeps apart from "
            "their codes"
        )
    if report.equalisation:
        _explain(report.equalisation)
    if report.presets:
        terminal.print_table(_presets(report, show_all=show_all))
    if report.misses:
        terminal.print_line("It cannot be converted:")
        for miss in report.misses:
            where = "model" if miss.layer is None else f"layer {miss.layer}"
            node = f" (node {miss.node})" if miss.node else ""
            terminal.print_line(f"  {where}{node}: {miss.reason}")
    elif report.convertible and following:
        terminal.print_line(f"next: tq-onnx convert {shlex.quote(str(model))}")


def _layers(report: InspectionReport) -> TextTable:
    """Return one row for each kind of layers, with the noise of the worst one."""
    noise = {entry.layer: entry for entry in report.equalisation if entry.noise_after}
    kinds: dict[tuple[object, ...], list[int]] = {}
    for layer in report.layers:
        facts = (
            layer.dialect,
            layer.num_heads,
            layer.kv_num_heads,
            layer.head_size,
            layer.dtype.lower(),
            f"{layer.scale:.6g}",
            layer.mask,
        )
        kinds.setdefault(facts, []).append(layer.layer)
    rows = [
        (
            number_ranges(layers),
            *facts,
            *_noise([noise[layer] for layer in layers if layer in noise]),
        )
        for facts, layers in kinds.items()
    ]
    columns = (">layers", "form", ">heads", ">KV heads", ">head size", "type", ">scale", "mask")
    extra = (">noise", ">equalised", ">gain") if noise else ()
    brief = [name for name in (*columns, *extra) if name not in ("type", ">scale")]
    return TextTable.of((*columns, *extra), rows, brief=brief)


def _presets(report: InspectionReport, *, show_all: bool) -> TextTable:
    """Return one row for each preset, and one for the model as it is."""
    before = report.bytes_per_token or 0
    bits = ELEMENT_BITS[ELEMENTS[report.layers[0].dtype]]
    half = before * HALF_BITS / bits
    rows: list[tuple[object, ...]] = [
        ("(now)", f"float{bits}", "", f"{before:,}", f"{HALF_BITS / bits:.2f}", "")
    ]
    for offer in report.presets:
        preset = PRESETS[offer.preset]
        if not (show_all or preset.name in COMMON_PRESETS):
            continue
        codecs = ("", "") if preset.key.is_raw else (preset.key, preset.value)
        if offer.bytes_per_token is None:
            rows.append((offer.preset, *codecs, "", "", offer.refusal))
            continue
        mark = "experimental" if preset.experimental else ""
        size = offer.bytes_per_token
        ratio = f"{half / size:.2f}" if half else ""
        rows.append((offer.preset, *codecs, f"{size:,}", ratio, mark))
    columns = ("preset", "keys", "values", ">bytes per token", ">times smaller than float16", "")
    return TextTable.of(columns, rows)


def _noise(entries: Sequence[LayerEqualisation]) -> tuple[str, ...]:
    """Return the cells of the worst of some layers: noise of its scores, equalised, and gain."""
    if not entries:
        return ()
    worst = max(entries, key=lambda entry: entry.noise_after or 0.0)
    after = f"{worst.noise_after:.4f}" + (" unsafe" if worst.unsafe else "")
    return f"{worst.noise_before:.4f}", after, f"{worst.gain:.2f}"


def _explain(equalisation: Sequence[LayerEqualisation]) -> None:
    """Explain the noise of scores, and what to do where it is large."""
    from tq_onnx.conversion.equalise import SAFER_PRESET

    known = [entry for entry in equalisation if entry.noise_after is not None]
    reason = next((entry.reason for entry in equalisation if entry.reason), "")
    if not known:
        terminal.print_line(
            f"Norm weights tell no scales ({reason}); `tq-onnx calibrate` finds them."
        )
        return
    terminal.print_line(
        "noise: standard deviation that 4-bit keys add to a score, in nats, in the worst layer; "
        "equalised: the same with scales, as convert makes them; gain: ratio of variances"
    )
    if reason:
        terminal.print_line(
            f"{len(equalisation) - len(known)} layers have no such weights ({reason})"
        )
    unsafe = [entry for entry in known if entry.unsafe]
    if unsafe:
        terminal.print_line(
            f"4-bit keys are unsafe in {len(unsafe)} of {len(equalisation)} layers: "
            f"`tq-onnx convert --preset {SAFER_PRESET}` is safer"
        )
