"""``tq-onnx convert``: rewrite a decoder, or a folder with decoders, to TurboQuant caches."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import Any, get_args

import click

from tq_onnx.api import converting
from tq_onnx.cli import flags, terminal
from tq_onnx.cli.grouped import GroupedCommand, grouped
from tq_onnx.codec.presets import DEFAULT_PRESET, DEFAULT_SEED, MAX_SEED, PRESETS, ROTATIONS
from tq_onnx.codec.spec import MAX_BITS
from tq_onnx.conversion.options import CENTER_FROM
from tq_onnx.conversion.target import CPU, TargetOption
from tq_onnx.runtime.platforms import PLATFORMS
from tq_onnx.targets.paged.target import PAGED
from tq_onnx.targets.registry import TARGETS

_output = grouped("Output")
_codec = grouped("Codec")
_window = grouped("Exact window")
_layers = grouped("Layers")
_calibration = grouped("Calibration")
_target = grouped("Target")

_WITH_WINDOW = [preset for preset in PRESETS.values() if preset.window]
_WITHOUT_WINDOW = ", ".join(target.name for target in TARGETS.values() if not target.has_windows)


def _windows() -> str:
    """Return the windows of presets, and which presets have them."""
    return ", ".join(
        f"{size} with {', '.join(one.name for one in _WITH_WINDOW if one.window == size)}"
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
            option.flag,
            type=click.Choice(option.words) if option.words else flags.Whole(option.least),
            metavar=None if option.words else option.metavar,
            # One that was not given is no option of a target that has none.
            default=None,
            help=f"With --target {' or '.join(names)}: {option.help}"
            + ("" if option.default is None else f"  [default: {option.default}]"),
        )
        command = add(command)
    return command


@click.command(cls=GroupedCommand)
@click.argument("model", type=flags.FilePath())
@_output(
    "-o",
    "--output",
    type=flags.FilePath(),
    help="File or folder to write.  [default: MODEL with .PRESET.onnx, or -PRESET for a folder, "
    "beside MODEL; with a TARGET .PRESET-TARGET.onnx and -PRESET-TARGET]",
)
@_output(
    "--overwrite",
    is_flag=True,
    help="Replace an output that exists; in a folder, files of that name.",
)
@_output(
    "--external-data",
    type=click.Choice(get_args(converting.ExternalData)),
    help="How to provide weights in files beside MODEL. An output in the same folder shares them "
    "(keep). One in another folder gets a copy, or a hard link, which ONNX Runtime reads and onnx "
    "does not.  [default: keep in the same folder, else copy]",
)
@flags.option_of_json(_output)
@_codec(
    "--preset",
    type=click.Choice(list(PRESETS)),
    metavar="PRESET",
    default=DEFAULT_PRESET,
    show_default=True,
    help="Codecs of keys and values, see `tq-onnx presets`.",
)
@_codec(
    "--bits-k",
    type=flags.Whole(1, MAX_BITS),
    metavar="BITS",
    help="Bits of the keys, in the preset's kind of codec.",
)
@_codec(
    "--bits-v",
    type=flags.Whole(1, MAX_BITS),
    metavar="BITS",
    help="Bits of the values, in the preset's kind of codec.",
)
@_codec(
    "--rotation",
    type=click.Choice(list(ROTATIONS)),
    help="Kind of the rotations; hadamard needs a head size that is a power of two.  "
    "[default: from the preset]",
)
@_codec(
    "--seed",
    type=flags.Whole(0, MAX_SEED),
    default=DEFAULT_SEED,
    show_default=True,
    help="Seed of the rotations.",
)
@_window(
    "--window",
    type=flags.Whole(),
    metavar="N",
    help="Keep the newest N tokens exactly, as float16 beside their codes, for the queries near "
    "them. Costs memory once, not for each token. It is not the model's sliding window.  "
    f"[default: {_windows()}, else 0; 0 in folders of onnxruntime-genai and for {_WITHOUT_WINDOW}]",
)
@_window(
    "--sinks",
    type=flags.Whole(),
    metavar="N",
    help="Keep the first N tokens exactly, which most queries attend to.  "
    f"[default: {_WITH_WINDOW[0].sinks} where there is a window by default]",
)
@_layers(
    "--layers",
    metavar="A-B",
    help="Compress these layers only, counted from 0: 4-12, 7, or 0,2-5.  [default: all]",
)
@_layers(
    "--boundary-layers",
    type=flags.Whole(),
    default=0,
    metavar="N",
    help="Leave the first N and the last N layers uncompressed.",
)
@_calibration(
    "--equalize/--no-equalize",
    default=None,
    help="Fold scales into the norm weights of queries and keys. Quantised keys then cost less; "
    "nothing else changes.  [default: if there are such weights]",
)
@_calibration(
    "--calibration",
    type=flags.FilePath(),
    metavar="FILE",
    help="Statistics of this model from `tq-onnx calibrate`. Center keys and values by their "
    "means, and equalize keys of a model without norm weights. int2.75 and int2.5 need it.",
)
@_calibration(
    "--center-from",
    type=flags.Whole(),
    metavar="N",
    help="With --calibration: the first token that is centered by the mean of all later tokens.  "
    f"[default: {CENTER_FROM}]",
)
@_output(
    "--for",
    "platform",
    type=click.Choice(list(PLATFORMS)),
    metavar="PLATFORM",
    help="Platform whose operator library a folder of onnxruntime-genai gets: "
    f"{', '.join(PLATFORMS)}.  [default: this one]",
)
@_output("--wheel", type=flags.FilePath(), help=flags.WHEEL)
@_target(
    "--target",
    type=click.Choice(list(TARGETS)),
    metavar="TARGET",
    default=CPU.name,
    show_default=True,
    help=f"Purpose of the model: {', '.join(TARGETS)}.  "
    + " ".join(f"{target.name}: {target.help}." for target in TARGETS.values() if target.help),
)
@_target(
    "--paged",
    "target",
    flag_value=PAGED,
    help=f"The same as --target {PAGED}.",
)
@_of_targets
def convert(
    *,
    model: Path,
    output: Path | None,
    preset: str,
    target: str,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Convert an exported decoder to a TurboQuant KV cache.

    MODEL is an ONNX decoder with past key/value inputs and outputs, from onnxruntime-genai's model
    builder or torch.onnx.export. MODEL is not changed. Large weights in external data are not
    read.

    MODEL may also be a folder of onnxruntime-genai or Hugging Face. Its decoders are converted;
    tokenizer, configurations and other models are copied. onnxruntime-genai runs the new folder
    without a change.

    `tq-onnx presets` lists the presets and their cost per token. All options combine with all
    presets. Layers that stay uncompressed have caches of bytes, too.

    \b
    Example:
      tq-onnx convert model.onnx
      tq-onnx convert qwen3-genai/
      tq-onnx convert qwen3-genai/ --for windows-arm64 --wheel wheels/
      tq-onnx convert model.onnx -o small/model.onnx --preset int3
      tq-onnx convert model.onnx --preset k8v4 --boundary-layers 2
      tq-onnx convert model.onnx --calibration model.calibration.safetensors
      tq-onnx convert model.onnx --seed 7 --rotation hadamard --json
    """
    from tq_onnx.cli.converted import print_folder, print_model
    from tq_onnx.integrations.folderconversion import FolderReport

    written = output or converting.default_output(model, preset, target)
    with terminal.progress("Opening the original") as on_progress:
        report = converting.convert(
            model, written, preset=preset, target=target, on_progress=on_progress, **arguments
        )
    if as_json:
        terminal.print_json(report)
    elif isinstance(report, FolderReport):
        print_folder(report, model, written)
    else:
        print_model(report, model, written)


if convert.help is not None:
    convert.help = cleandoc(convert.help) + "".join(
        f"\n  tq-onnx convert model.onnx {target.example}"
        for target in TARGETS.values()
        if target.example
    )
