"""``tq-onnx convert``: a decoder in, the same decoder with a TurboQuant KV cache out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from tq_onnx.cli import terminal
from tq_onnx.codec.presets import DEFAULT_PRESET, DEFAULT_SEED, PRESETS, ROTATIONS

if TYPE_CHECKING:
    from tq_onnx.graph.reports import ConversionReport
    from tq_onnx.graph.save import ExternalData

_DOING: Final = {
    "load": "Reading the graph",
    "recognise": "Looking for attention",
    "plan": "Planning",
    "rewrite": "Rewriting",
    "check": "Checking the result",
    "save": "Writing",
}
_EXTERNAL_DATA: Final = ("keep", "copy", "link")


@click.command()
@click.argument("model", type=click.Path(path_type=Path, readable=False))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="File to write.  [default: MODEL with .PRESET.onnx, beside MODEL]",
)
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default=DEFAULT_PRESET,
    show_default=True,
    help="Codecs of keys and values.",
)
@click.option(
    "--seed", type=int, default=DEFAULT_SEED, show_default=True, help="Seed of the rotations."
)
@click.option(
    "--rotation",
    type=click.Choice(list(ROTATIONS)),
    help="Kind of the rotations.  [default: the preset's]",
)
@click.option(
    "--external-data",
    type=click.Choice(_EXTERNAL_DATA),
    help="What becomes of weights in files beside MODEL. An output in the same folder shares them "
    "(keep); one in another folder gets a copy, or a hard link, which ONNX Runtime reads and onnx "
    "does not.  [default: keep in the same folder, else copy]",
)
@click.option("--overwrite", is_flag=True, help="Replace an output that exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def convert(
    *,
    model: Path,
    output: Path | None,
    preset: str,
    seed: int,
    rotation: str | None,
    external_data: ExternalData | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Convert an exported decoder to a TurboQuant KV cache.

    MODEL is an ONNX decoder with past key/value inputs and outputs, from onnxruntime-genai's model
    builder or torch.onnx.export. It is not changed. Weights in external data are not read.

    \b
    Example:
      tq-onnx convert model.onnx
      tq-onnx convert model.onnx -o small/model.onnx --preset int3
      tq-onnx convert model.onnx --seed 7 --rotation hadamard --json
    """
    from tq_onnx.graph import pipeline

    target = output or model.with_name(f"{model.stem}.{preset}.onnx")
    with terminal.progress() as bar:
        task = bar.add_task(_DOING["load"], total=len(pipeline.STAGES))
        copying = bar.add_task("Copying external data", total=None, visible=False)

        def on_stage(stage: pipeline.Stage) -> None:
            done = pipeline.STAGES.index(stage)
            bar.update(task, completed=done, description=_DOING[stage])

        def on_copy(done: int, total: int) -> None:
            bar.update(copying, completed=done, total=total, visible=True)

        report = pipeline.convert(
            model,
            target,
            preset=preset,
            seed=seed,
            rotation=rotation,
            overwrite=overwrite,
            external_data=external_data,
            on_stage=on_stage,
            on_copy=on_copy,
        )
    if as_json:
        terminal.print_json(report)
    else:
        _print(report, model, target)


def _print(report: ConversionReport, model: Path, target: Path) -> None:
    plan, files = report.plan, report.files
    dialects = ", ".join(dict.fromkeys(layer.dialect for layer in plan.layers))
    before, after = report.bytes_per_token_before, report.bytes_per_token_after
    rows = [
        ("layers", f"{len(plan.layers)} ({dialects})"),
        ("preset", f"{plan.preset}, {plan.rotation} rotation, seed {plan.seed}"),
        ("cache per token", f"{before:,} -> {after:,} bytes, {report.ratio:.2f} times smaller"),
        ("output", f"{target} ({files.bytes_written:,} bytes written)"),
    ]
    how = {"keep": "shared with the original", "copy": "copied", "link": "hard-linked"}
    rows += [("needs", f"{file} ({how[files.external_data or 'keep']})") for file in files.data]
    rows.append(("next", f"tq-onnx verify {shlex.quote(str(model))} {shlex.quote(str(target))}"))
    terminal.print_facts(rows)
