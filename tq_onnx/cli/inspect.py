"""``tq-onnx inspect``: what convert would find in a model, or what it did to one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tq_onnx.cli import terminal
from tq_onnx.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tq_onnx.graph.plan import LayerPlan, Plan
    from tq_onnx.graph.reports import InspectionReport


@click.command()
@click.argument("model", type=click.Path(path_type=Path, readable=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def inspect(ctx: click.Context, model: Path, as_json: bool) -> None:
    """Show what convert would find in MODEL, or what it did to it.

    For an original: the attention layers and the cache bytes of one token, now and with each
    preset, or the reasons why it cannot be converted (exit code 3). For a converted model: preset,
    seed, row layout and cache bytes. MODEL may also be a folder: then this of each decoder in it,
    and what else convert would take along.

    \b
    Example:
      tq-onnx inspect model.onnx
      tq-onnx inspect qwen3-genai/
      tq-onnx inspect model.int4.onnx --json
    """
    if model.is_dir():
        if not _inspect_folder(model, as_json):
            ctx.exit(UnsupportedModelError.exit_code)
        return
    from tq_onnx.graph import pipeline

    with terminal.progress() as bar:
        bar.add_task("Reading the graph", total=None)
        report = pipeline.inspect(model)
    if as_json:
        terminal.print_json(report)
    elif report.plan is not None:
        _print_converted(model, report.plan, report.bytes_per_token)
    else:
        _print_original(model, report)
    if report.plan is None and not report.convertible:
        ctx.exit(UnsupportedModelError.exit_code)


def _inspect_folder(folder: Path, as_json: bool) -> bool:
    """Shows what is in a folder; returns whether there is anything for convert, or from it."""
    from tq_onnx.integrations.folder import require_decoder, survey

    with terminal.progress() as bar:
        task = bar.add_task("Looking at the folder", total=None)
        found = survey(
            folder,
            lambda name: bar.update(task, description=terminal.printable(f"Looking at {name}")),
        )
    converted = [model for model in found.models if model.role == "converted"]
    if not converted:
        require_decoder(found, folder)
    reports = [model.report for model in found.decoders]
    convertible = bool(reports) and all(report.convertible for report in reports)
    if as_json:
        terminal.print_json(
            {
                "folder": found.path,
                "convertible": convertible,
                "models": found.models,
                "data": found.data,
                "companions": found.companions,
                "left_out": found.left_out,
                "genai": found.genai is not None,
            }
        )
        return convertible or not reports
    for model in (*found.decoders, *converted):
        path = folder / model.name
        if model.report.plan is not None:
            _print_converted(path, model.report.plan, model.report.bytes_per_token)
        else:
            _print_original(path, model.report, following=False)
    if not reports:
        return True
    others = [model.name for model in found.models if model.role == "other"]
    rows = [
        (what, name)
        for what, names in (("carries", others), ("data", found.data))
        for name in names
    ]
    rows += [("carries", ", ".join(found.companions))] if found.companions else []
    rows += [("leaves out", f"{entry.name}: {entry.reason}") for entry in found.left_out]
    if rows:
        terminal.print_facts(rows)
    if convertible:
        terminal.print_line(f"next: tq-onnx convert {shlex.quote(str(folder))}")
    return convertible


def _print_converted(model: Path, plan: Plan, size: int | None) -> None:
    first = plan.layers[0]
    rows = (
        ("preset", plan.preset),
        ("keys", f"{first.key_codec}, {first.key_bits} bits, {first.key_row_bytes} bytes a row"),
        (
            "values",
            f"{first.value_codec}, {first.value_bits} bits, {first.value_row_bytes} bytes a row",
        ),
        ("rotation", f"{plan.rotation}, seed {plan.seed}"),
        ("layers", f"{len(plan.layers)} ({first.dialect}), {_heads(first)}"),
        ("caches", _caches(plan)),
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
    return "fixed capacity or growing" if plan.fixed_capacity else "growing"


def _heads(layer: LayerPlan) -> str:
    heads = f"{layer.num_heads} heads, {layer.kv_num_heads} KV heads"
    return f"{heads}, head size {layer.head_size}"


def _print_original(model: Path, report: InspectionReport, *, following: bool = True) -> None:
    terminal.print_line(f"{model}: opset {report.opset}")
    if report.layers:
        table = terminal.make_table(
            ">layer", "form", ">heads", ">KV heads", ">head size", "type", ">scale", "mask"
        )
        for found in report.layers:
            terminal.add_row(
                table,
                found.layer,
                found.dialect,
                found.num_heads,
                found.kv_num_heads,
                found.head_size,
                found.dtype.lower(),
                f"{found.scale:.6g}",
                found.mask,
            )
        terminal.print_table(table)
    if report.presets:
        table = terminal.make_table("preset", ">cache bytes per token", ">times smaller")
        terminal.add_row(table, "(now)", f"{report.bytes_per_token:,}", "1.00")
        for offer in report.presets:
            if offer.bytes_per_token is None or offer.ratio is None:
                terminal.add_row(table, offer.preset, offer.refusal, "")
            else:
                cells = (f"{offer.bytes_per_token:,}", f"{offer.ratio:.2f}")
                terminal.add_row(table, offer.preset, *cells)
        terminal.print_table(table)
    if report.misses:
        terminal.print_line("It cannot be converted:")
        for miss in report.misses:
            where = "model" if miss.layer is None else f"layer {miss.layer}"
            node = f" (node {miss.node})" if miss.node else ""
            terminal.print_line(f"  {where}{node}: {miss.reason}")
    elif report.convertible and following:
        terminal.print_line(f"next: tq-onnx convert {shlex.quote(str(model))}")
