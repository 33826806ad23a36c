"""``tq-onnx convert``: rewrite a decoder, or a folder with decoders, to TurboQuant caches."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import Any, Final, get_args

import click

from tq_onnx.api import converting
from tq_onnx.cli import flags, terminal
from tq_onnx.cli.grouped import GroupedCommand, grouped
from tq_onnx.codec.presets import DEFAULT_PRESET, DEFAULT_SEED, MAX_SEED, PRESETS, ROTATIONS
from tq_onnx.codec.spec import MAX_BITS
from tq_onnx.conversion.options import CENTER_FROM
from tq_onnx.conversion.target import CPU, TargetOption
from tq_onnx.errors import UsageError
from tq_onnx.ops.features import EXACT_WINDOW
from tq_onnx.runtime.platforms import PLATFORMS
from tq_onnx.targets.paged.target import PAGED
from tq_onnx.targets.registry import TARGETS

_output = grouped("Output")
_codec = grouped("Codec")
_exact_tokens = grouped("Exact tokens")
_layers = grouped("Layers")
_calibration = grouped("Calibration")
_target = grouped("Target")

_WITH_WINDOW = [preset for preset in PRESETS.values() if preset.window]
_WITHOUT_WINDOW = " or ".join(
    target.name for target in TARGETS.values() if EXACT_WINDOW in target.capabilities.lacking
)


def _windows() -> str:
    """Return the windows of presets, and which presets have them."""
    return "; ".join(
        f"{size} for {', '.join(preset.name for preset in _WITH_WINDOW if preset.window == size)}"
        for size in dict.fromkeys(preset.window for preset in _WITH_WINDOW)
    )


def _of_targets(command: Callable[..., None]) -> Callable[..., None]:
    """Add a flag for each option that only some target has."""
    owners: dict[TargetOption, list[str]] = {}
    for target in TARGETS.values():
        for option in target.options:
            owners.setdefault(option, []).append(target.name)
    for option, names in reversed(owners.items()):
        add = _target(
            f"--{option.name.replace('_', '-')}",
            type=flags.Whole(option.least),
            metavar="N",
            # One that was not given is no option of a target that has none.
            default=None,
            help=f"With --target {' or '.join(names)}: {option.help}"
            + ("" if option.default is None else f"  [default: {option.default}]"),
        )
        command = add(command)
    return command


_DEFAULTS: Final = tuple(
    f"{target.default_preset} for {target.name}"
    for target in TARGETS.values()
    if target.default_preset != DEFAULT_PRESET
)
"""Where the default preset is another one."""


@click.command(cls=GroupedCommand)
@click.argument("model", type=flags.FilePath())
@_output(
    "-o",
    "--output",
    type=flags.FilePath(),
    first=True,
    help="Write to this file or folder.  [default: MODEL.PRESET.onnx or FOLDER-PRESET beside "
    "MODEL; a calibration adds -cal to PRESET, a target other than cpu adds -TARGET]",
)
@_codec(
    *flags.PRESET_NAMES,
    type=flags.PresetName(),
    metavar="PRESET",
    first=True,
    help=f"{flags.PRESET}  [default: {'; '.join((DEFAULT_PRESET, *_DEFAULTS))}]",
)
@_calibration(
    "--calibration",
    type=flags.FilePath(),
    metavar="FILE",
    help="Use the statistics that `tq-onnx calibrate` wrote to FILE.",
)
@_calibration(
    "--calibrate",
    is_flag=True,
    first=True,
    help="Lower the error by statistics of the model. Reads the file that `tq-onnx calibrate` "
    "wrote, or else runs it first.",
)
@_target(
    "--target",
    type=flags.CurrentName(list(TARGETS)),
    metavar="TARGET",
    first=True,
    help=f"Runtime to convert for: {', '.join(TARGETS)}.  "
    + " ".join(f"{target.name}: {target.help}." for target in TARGETS.values() if target.help)
    + f"  [default: {CPU.name}]",
)
@_output(
    "--overwrite",
    is_flag=True,
    first=True,
    help="Replace existing output; in a folder, files of the same names.",
)
@_output(
    "--external-data",
    type=click.Choice(get_args(converting.ExternalData)),
    help="Keep weight files where they are, copy them, or hard-link them. onnxruntime reads hard "
    "links; the onnx package does not.  [default: keep for output beside MODEL, else copy]",
)
@flags.option_of_json(_output)
@_codec("--bits-k", type=flags.Whole(1, MAX_BITS), metavar="BITS", help="Bits of a key element.")
@_codec("--bits-v", type=flags.Whole(1, MAX_BITS), metavar="BITS", help="Bits of a value element.")
@_codec(
    "--rotation",
    type=click.Choice(list(ROTATIONS)),
    help="Rotation before quantization. hadamard needs a head size that is a power of two.  "
    "[default: the preset's]",
)
@_codec(
    "--seed",
    type=flags.Whole(0, MAX_SEED),
    default=DEFAULT_SEED,
    show_default=True,
    help="Random seed of the rotations.",
)
@_exact_tokens(
    "--residual-length",
    type=flags.Whole(),
    metavar="N",
    help="Also keep the newest N tokens in float16, at a fixed cost per sequence. Independent of "
    f"the model's sliding window.  [default: {_windows()}; else 0. 0 with --target "
    f"{_WITHOUT_WINDOW}]",
)
@_exact_tokens(
    "--sink-tokens",
    type=flags.Whole(),
    metavar="N",
    help="Also keep the first N tokens in float16.  "
    f"[default: {_WITH_WINDOW[0].sinks} if the default of --residual-length is above 0, else 0]",
)
@_layers(
    "--layers",
    metavar="A-B",
    help="Compress only these layers, counted from 0: 4-12, 7 or 0,2-5.  [default: all]",
)
@_layers(
    "--boundary-layers",
    type=flags.Whole(),
    default=0,
    show_default=True,
    metavar="N",
    help="Leave the first N and the last N layers uncompressed.",
)
@_calibration(
    "--equalize/--no-equalize",
    default=None,
    help="Rescale queries and keys, to lower the error of keys.  [default: on if norm weights or a "
    "calibration tell how]",
)
@_calibration(
    "--center-from",
    type=flags.Whole(),
    metavar="N",
    help="With --calibration: the first N tokens get means of their own, all others share one.  "
    f"[default: {CENTER_FROM}]",
)
@_output(
    "--for",
    "platform",
    type=click.Choice(list(PLATFORMS)),
    metavar="PLATFORM",
    help=f"{flags.PLATFORM}  [default: that of the wheel, else this machine's]",
)
@_output(
    "--revision",
    metavar="REVISION",
    help="Branch, tag or commit of a repository of Hugging Face.  [default: its main branch]",
)
@_output(
    "--include",
    metavar="PATTERN",
    help="Fetch only these ONNX files of it, as onnx/model_q4.onnx.  [default: all]",
)
@_output("--wheel", type=flags.FilePath(), help=flags.WHEEL)
@_target("--paged", is_flag=True, help=f"Same as --target {PAGED}.")
@_of_targets
def convert(
    *,
    model: Path,
    output: Path | None,
    preset: str | None,
    target: str | None,
    paged: bool,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Convert an exported decoder to a TurboQuant KV cache.

    Reads MODEL, an ONNX decoder with past key/value inputs and outputs, from onnxruntime-genai's
    model builder, optimum or torch.onnx.export. Writes a new file; MODEL is not changed.

    MODEL may also be a folder of onnxruntime-genai or Hugging Face. The output is then a new
    folder, with the converted decoders and copies of all other files. OWNER/NAME is fetched from
    Hugging Face into its cache; `hf upload` publishes the output.

    \b
    Example:
      tq-onnx convert model.onnx
      tq-onnx convert qwen3-genai/
      tq-onnx convert model.onnx -o small/model.onnx --preset int3
      tq-onnx convert model.onnx --calibrate
    """
    from tq_onnx.cli.converted import print_folder, print_model
    from tq_onnx.integrations.folderconversion import FolderReport

    if paged and target not in (None, PAGED):
        raise UsageError(f'`target="{target}"` and `paged` are two targets', fix="give one of them")
    target = PAGED if paged else target or CPU.name
    calibrated = arguments["calibrate"] or arguments["calibration"] is not None
    written = output or converting.default_output(model, preset, target, calibrated=calibrated)
    with terminal.progress("Opening the original") as on_progress:
        report = converting.convert(
            model, written, preset=preset, target=target, on_progress=on_progress, **arguments
        )
    reports = report.decoders if isinstance(report, FolderReport) else (report,)
    terminal.print_warnings(dict.fromkeys(text for entry in reports for text in entry.warnings))
    if as_json:
        terminal.print_json(report)
    elif isinstance(report, FolderReport):
        print_folder(report, model, written)
    else:
        print_model(report, model, written)


if convert.help is not None:
    convert.help = cleandoc(convert.help) + "".join(
        "\n  tq-onnx convert model.onnx"
        + "".join(
            f" --{name.replace('_', '-')} {value}".rstrip()
            for name, value in {"target": target.name, **target.example}.items()
        )
        for target in TARGETS.values()
        if target.help
    )
