"""``tq-onnx convert``: a decoder, or a folder with one, in; the same with TurboQuant caches out."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tq_onnx.cli import flags, planned, terminal
from tq_onnx.codec.presets import DEFAULT_PRESET, DEFAULT_SEED, PRESETS, ROTATIONS
from tq_onnx.conversion.options import CENTER_FROM, Options
from tq_onnx.conversion.target import CPU, Target, TargetOption
from tq_onnx.errors import UsageError
from tq_onnx.targets.registry import TARGETS, target_of, target_of_plan

if TYPE_CHECKING:
    from tq_onnx.conversion.reports import ConversionReport
    from tq_onnx.files.save import ExternalData
    from tq_onnx.integrations.folderconversion import FolderReport
    from tq_onnx.integrations.genai import GenaiChanges

_SIZES: Final = tuple(
    dict.fromkeys(option.name for target in TARGETS.values() for option in target.options)
)
_EXTERNAL_DATA: Final = ("keep", "copy", "link")


def _sizes(command: Callable[..., None]) -> Callable[..., None]:
    """Add a flag for each option that only some target has."""
    owners: dict[TargetOption, list[str]] = {}
    for target in TARGETS.values():
        for option in target.options:
            owners.setdefault(option, []).append(target.name)
    for option, names in reversed(owners.items()):
        add = click.option(
            option.flag,
            type=click.IntRange(min=option.least),
            metavar=option.metavar,
            # One that was not given is no option of a target that has none.
            default=None,
            help=f"With --target {' or '.join(names)}: {option.help}"
            + ("" if option.default is None else f"  [default: {option.default}]"),
        )
        command = add(command)
    return command


@click.command()
@click.argument("model", type=click.Path(path_type=Path, readable=False))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="File or folder to write.  [default: MODEL with .PRESET.onnx, or -PRESET for a folder, "
    "beside MODEL; with a TARGET .PRESET-TARGET.onnx and -PRESET-TARGET]",
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
    help="Kind of the rotations; hadamard needs a head size that is a power of two.  "
    "[default: the preset's]",
)
@click.option(
    "--bits-k", type=int, metavar="BITS", help="Bits of the keys, in the preset's kind of codec."
)
@click.option(
    "--bits-v", type=int, metavar="BITS", help="Bits of the values, in the preset's kind of codec."
)
@click.option(
    "--boundary-layers",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Leave the first N and the last N layers uncompressed.",
)
@click.option(
    "--layers",
    metavar="A-B",
    help="Compress these layers only, counted from 0: 4-12, 7, or 0,2-5.  [default: all]",
)
@click.option(
    "--equalize/--no-equalize",
    default=None,
    help="Fold scales into the norm weights of queries and keys, which makes rotated keys cost "
    "less and changes nothing else.  [default: where there are such weights]",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, readable=False),
    metavar="FILE",
    help="Statistics that `tq-onnx calibrate` made of this model: keys and values are centered by "
    "their means, and keys equalised where there are no norm weights for it.",
)
@click.option(
    "--center-from",
    type=click.IntRange(min=0),
    default=CENTER_FROM,
    show_default=True,
    metavar="N",
    help="With --calibration: the first token that is centered by the mean of all later ones.",
)
@click.option(
    "--target",
    type=click.Choice(list(TARGETS)),
    default=CPU.name,
    show_default=True,
    help="What the model is made for.  "
    + " ".join(f"{target.name}: {target.help}." for target in TARGETS.values() if target.help),
)
@_sizes
@click.option(
    "--external-data",
    type=click.Choice(_EXTERNAL_DATA),
    help="What becomes of weights in files beside MODEL. An output in the same folder shares them "
    "(keep); one in another folder gets a copy, or a hard link, which ONNX Runtime reads and onnx "
    "does not. A copy that is there already is used.  [default: keep in the same folder, else "
    "copy]",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace an output that exists; in a folder, files of the same names.",
)
@flags.as_json
def convert(
    *,
    model: Path,
    output: Path | None,
    preset: str,
    external_data: ExternalData | None,
    overwrite: bool,
    as_json: bool,
    target: str,
    **chosen: Any,
) -> None:
    """Convert an exported decoder to a TurboQuant KV cache.

    MODEL is an ONNX decoder with past key/value inputs and outputs, from onnxruntime-genai's model
    builder or torch.onnx.export. It is not changed. Weights in external data are not read.

    MODEL may also be a folder of onnxruntime-genai or Hugging Face: its decoders are converted, and
    tokenizer, configurations and other models go along. A folder of onnxruntime-genai then runs
    there as it is.

    `tq-onnx presets` lists the presets, and what a token costs with each. All options combine with
    all presets; layers that stay uncompressed have caches of bytes like the others.

    \b
    Example:
      tq-onnx convert model.onnx
      tq-onnx convert qwen3-genai/
      tq-onnx convert model.onnx -o small/model.onnx --preset int3
      tq-onnx convert model.onnx --preset k8v4 --boundary-layers 2
      tq-onnx convert model.onnx --layers 4-20 --bits-k 5 --bits-v 3
      tq-onnx convert model.onnx --calibration model.calibration.safetensors
      tq-onnx convert model.onnx --seed 7 --rotation hadamard --json
    """
    _check_used(chosen)
    made_for = target_of(target, **{name: chosen.pop(name) for name in _SIZES})
    options = Options(**chosen)
    if model.is_dir():
        _convert_folder(
            model,
            output,
            preset=preset,
            options=options,
            target=made_for,
            external_data=external_data,
            overwrite=overwrite,
            as_json=as_json,
        )
        return
    from tq_onnx.conversion import pipeline

    written = output or model.with_name(f"{model.stem}.{made_for.kind(preset)}.onnx")
    with terminal.progress("Reading the graph") as on_progress:
        report = pipeline.convert(
            model,
            written,
            preset=preset,
            options=options,
            target=made_for,
            overwrite=overwrite,
            external_data=external_data,
            on_progress=on_progress,
        )
    if as_json:
        terminal.print_json(report)
    else:
        _print(report, model, written)


if convert.help is not None:
    convert.help = cleandoc(convert.help) + "".join(
        f"\n  tq-onnx convert model.onnx {target.example}"
        for target in TARGETS.values()
        if target.example
    )


def _check_used(chosen: dict[str, Any]) -> None:
    """Refuses an option that would do nothing."""
    if chosen["calibration"] is None and _is_given("center_from"):
        raise UsageError(
            "--center-from says where the statistics of --calibration begin, and there are none",
            fix="give --calibration, or leave --center-from out",
        )


def _is_given(parameter: str) -> bool:
    source = click.get_current_context().get_parameter_source(parameter)
    return source is click.core.ParameterSource.COMMANDLINE


def _print(report: ConversionReport, model: Path, target: Path) -> None:
    plan, files = report.plan, report.files
    before, after = report.bytes_per_token_before, report.bytes_per_token_after
    rows = [
        *planned.rows(plan, report.equalisation),
        ("cache per token", f"{before:,} -> {after:,} bytes, {report.ratio:.2f} times smaller"),
        ("output", f"{target} ({files.bytes_written:,} bytes written)"),
    ]
    how = {"keep": "shared with the original", "copy": "copied", "link": "hard-linked"}
    rows += [("needs", f"{file} ({how[files.external_data or 'keep']})") for file in files.data]
    if target_of_plan(plan).has_operators:
        pair = f"{shlex.quote(str(model))} {shlex.quote(str(target))}"
        rows.append(("next", f"tq-onnx verify {pair}"))
    terminal.print_facts(rows)
    if files.moved is not None:
        terminal.print_line(f"  {files.moved} holds weights that did not fit into the model file")
    planned.warn(plan, report.equalisation)


def _convert_folder(
    folder: Path,
    output: Path | None,
    *,
    preset: str,
    options: Options,
    target: Target,
    external_data: ExternalData | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    from tq_onnx.integrations import folderconversion

    written = output or folderconversion.default_output(folder, target.kind(preset))
    with terminal.progress("Looking at the folder") as on_progress:
        report = folderconversion.convert_folder(
            folder,
            written,
            preset=preset,
            options=options,
            target=target,
            overwrite=overwrite,
            external_data=external_data,
            on_progress=on_progress,
        )
    if as_json:
        terminal.print_json(report)
    else:
        _print_folder(report, folder, written)


def _print_folder(report: FolderReport, folder: Path, target: Path) -> None:
    first = report.decoders[0]
    rows = [
        *planned.rows(first.plan, first.equalisation),
        ("output", f"{target} ({report.bytes_written:,} bytes written)"),
    ]
    for decoder in report.decoders:
        dialects = ", ".join(dict.fromkeys(layer.dialect for layer in decoder.plan.layers))
        before, after = decoder.bytes_per_token_before, decoder.bytes_per_token_after
        name = decoder.output.relative_to(report.output).as_posix()
        rows.append(
            (
                "converted",
                f"{name}: {len(decoder.plan.layers)} layers ({dialects}), {before:,} -> {after:,} "
                f"cache bytes per token, {decoder.ratio:.2f} times smaller",
            )
        )
        if decoder.files.moved is not None:
            moved = decoder.files.moved.relative_to(report.output).as_posix()
            rows.append(("data", f"{moved} (weights that did not fit into the model file)"))
    how = "hard-linked" if report.external_data == "link" else "copied"
    rows += [("data", f"{name} ({how})") for name in report.data]
    if report.carried:
        rows.append(("carried", ", ".join(report.carried)))
    rows += [("left out", f"{entry.name}: {entry.reason}") for entry in report.left_out]
    if report.genai is not None:
        rows += _genai_rows(report.genai)
    there, here = shlex.quote(str(folder)), shlex.quote(str(target))
    rows.append(("next", f"tq-onnx verify {there} {here}"))
    terminal.print_facts(rows)
    for decoder in report.decoders:
        planned.warn(decoder.plan, decoder.equalisation)


def _genai_rows(changes: GenaiChanges) -> list[tuple[str, str]]:
    """What was changed in genai_config.json, and what to know about it."""
    patched = [f"custom_ops_library = {changes.library}"]
    if changes.head_size is not None:
        patched.append(f"head_size = {changes.head_size}, the bytes of a cache row")
    if changes.share_buffer != changes.share_buffer_before:
        patched.append("past_present_share_buffer = false: the caches of this model must grow")
    rows = [("genai", "; ".join(patched))]
    if changes.padding:
        rows.append(
            (
                "note",
                f"{changes.padding:,} bytes of each token are padding, because onnxruntime-genai "
                "wants keys and values of a layer equally wide",
            )
        )
    if changes.several_widths:
        rows.append(
            (
                "note",
                "layers have rows of several widths, which onnxruntime-genai takes from the graph; "
                "old releases (0.9) do not",
            )
        )
    if changes.may_share:
        rows.append(
            (
                "note",
                "past_present_share_buffer may be set to true now: caches are then updated in "
                "place instead of copied in every step",
            )
        )
    if changes.providers:
        rows.append(
            (
                "note",
                f"the configuration asks for {', '.join(changes.providers)}, and the library has "
                "kernels for the CPU only; without the entry custom_ops_library the function "
                "bodies run there",
            )
        )
    return rows
