"""Print a plan on the terminal: the options, and the conversion of each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from tq_onnx.cli import terminal
from tq_onnx.codec.elements import ELEMENT_BITS, ELEMENTS
from tq_onnx.codec.kind import UNBIASED
from tq_onnx.codec.presets import PRESETS
from tq_onnx.targets.registry import target_of_plan

if TYPE_CHECKING:
    from tq_onnx.conversion.equalise import LayerEqualisation
    from tq_onnx.plan import LayerPlan, Plan


def rows(plan: Plan, equalisation: Sequence[LayerEqualisation] = ()) -> list[tuple[str, str]]:
    """Return the facts of a plan: label and text."""
    dialects = ", ".join(dict.fromkeys(layer.dialect for layer in plan.layers))
    found = [("layers", f"{len(plan.layers)} ({dialects})"), ("preset", _preset(plan))]
    if summary := target_of_plan(plan).summary:
        found.append(("target", summary))
    groups: dict[str, list[LayerPlan]] = {}
    for layer in plan.layers:
        groups.setdefault(_codecs(layer), []).append(layer)
    found += [
        ("caches", text if len(groups) == 1 else f"{text} in {_names(layers)}")
        for text, layers in groups.items()
    ]
    found += _encoders(plan)
    for where, text in (
        ("norms", "scales in the norm weights of queries and keys"),
        ("nodes", "scales from the calibration file"),
    ):
        scaled = [layer for layer in plan.layers if layer.equalised == where]
        if scaled:
            some = "" if len(scaled) == len(plan.layers) else f" in {_names(scaled)}"
            found.append(("equalised", f"{text}{some}{_noise(equalisation, scaled)}"))
    centered = [layer for layer in plan.layers if layer.centered]
    if centered:
        some = "" if len(centered) == len(plan.layers) else f" in {_names(centered)}"
        found.append(("centered", f"keys and values by their means{some}"))
    if plan.has_matrices:
        found.append(("matrices", f"of each KV head, {plan.matrix_bytes:,} bytes in the model"))
    if plan.has_window:
        found.append(("exact window", _window(plan)))
    return found


def _window(plan: Plan) -> str:
    """Return the tokens that are kept exactly, and their cost."""
    parts = [f"the newest {plan.recent} tokens"] * (plan.recent > 0)
    parts += [f"the first {plan.sinks}"] * (plan.sinks > 0)
    return (
        f"{' and '.join(parts)} in float16, {plan.window_bytes:,} bytes of each sequence "
        f"({plan.overlay_rows} rows of each cache)"
    )


def element_bits(dtype: str) -> int:
    """Return the bits of an element type by its name in plans."""
    return ELEMENT_BITS[ELEMENTS[dtype]]


def warn(plan: Plan, equalisation: Sequence[LayerEqualisation]) -> None:
    """Say which layers have keys too coarse for their model."""
    from tq_onnx.conversion.equalise import SAFER_PRESET

    unsafe = [entry.layer for entry in equalisation if entry.unsafe]
    if unsafe:
        layers = [layer for layer in plan.layers if layer.layer in unsafe]
        terminal.print_line(
            f"note: the keys of {_names(layers)} are too uneven for {_kinds(layers)}: scores get a "
            f"noise of up to {max(entry.noise_after or 0.0 for entry in equalisation):.2f} nats; "
            f"--preset {SAFER_PRESET} is safer, and `tq-onnx report` measures it"
        )


def _kinds(layers: Iterable[LayerPlan]) -> str:
    return ", ".join(dict.fromkeys(str(layer.key.codec) for layer in layers))


def _preset(plan: Plan) -> str:
    if not any(codec.is_rotated for pair in plan.pairs for codec in pair):
        return plan.preset
    return f"{plan.preset}, {plan.rotation} rotation, seed {plan.seed}"


def _encoders(plan: Plan) -> list[tuple[str, str]]:
    """Return what encoders do beside rounding; nothing where they do nothing."""
    if not plan.gains:
        preset = PRESETS.get(plan.preset)
        if preset is None or not preset.gains or target_of_plan(plan).searches:
            return []
        return [("encoder", f"the nearest codes; there are no gains for --target {plan.target}")]
    text = f"the best of {plan.gains} gains"
    if plan.norm_correction == UNBIASED:
        text += ", unbiased scales"
    fed = [layer for layer in plan.layers if layer.key.feedback]
    if fed:
        some = "" if len(fed) == len(plan.layers) else f" in {_names(fed)}"
        text += f"; keys with error feedback{some}"
    return [("encoder", text)]


def _codecs(layer: LayerPlan) -> str:
    """Return codecs and bytes of a row, of both caches."""
    if layer.key.codec == layer.value.codec:
        return f"{layer.key.codec}, {layer.key.row_bytes} bytes a row"
    return (
        f"keys {layer.key.codec}, values {layer.value.codec}, "
        f"{layer.key.row_bytes} and {layer.value.row_bytes} bytes a row"
    )


def _names(layers: Sequence[LayerPlan]) -> str:
    """Return names like ``layers 0-3, 7``."""
    return f"layer{'s' if len(layers) > 1 else ''} {numbers([layer.layer for layer in layers])}"


def numbers(layers: Sequence[int]) -> str:
    """Return rising numbers like ``0-3, 7``."""
    runs = [
        [layer for _, layer in run]
        for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _noise(equalisation: Sequence[LayerEqualisation], layers: Sequence[LayerPlan]) -> str:
    """Return what scales do to the worst of some layers."""
    own = {layer.layer for layer in layers}
    entries = [entry for entry in equalisation if entry.layer in own and entry.noise_after]
    if not entries:
        return ""
    worst = max(entries, key=lambda entry: entry.noise_before or 0.0)
    return (
        f"; noise of a score {worst.noise_before:.3f} -> {worst.noise_after:.3f} nats at worst "
        f"(layer {worst.layer})"
    )
