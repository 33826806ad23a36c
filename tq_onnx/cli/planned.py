"""Print a plan on the terminal: the options, and the conversion of each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tq_onnx.cli import terminal
from tq_onnx.codec.presets import PRESETS
from tq_onnx.ops.features import EXACT_WINDOW, FEATURES, GAINS, Feature, in_some, layer_names
from tq_onnx.targets.registry import target_of_plan

if TYPE_CHECKING:
    from tq_onnx.conversion.calibrationrecord import CalibrationFacts
    from tq_onnx.conversion.equalise import LayerEqualisation
    from tq_onnx.plan import LayerPlan, Plan


def rows(
    plan: Plan,
    equalisation: Sequence[LayerEqualisation] = (),
    calibration: CalibrationFacts | None = None,
    exact_tokens: Feature = EXACT_WINDOW,
) -> list[tuple[str, str]]:
    """Return the facts of a plan, label and text; ``exact_tokens`` is how it may have them."""
    dialects = ", ".join(dict.fromkeys(layer.dialect for layer in plan.layers))
    facts = [("layers", f"{len(plan.layers)} ({dialects})"), ("preset", _preset(plan))]
    if summary := target_of_plan(plan).summary:
        facts.append(("target", summary))
    groups: dict[str, list[LayerPlan]] = {}
    for layer in plan.layers:
        groups.setdefault(_codecs(layer), []).append(layer)
    facts += [
        ("caches", text if len(groups) == 1 else f"{text} in {layer_names(layers)}")
        for text, layers in groups.items()
    ]
    preset, lacking = PRESETS.get(plan.preset), target_of_plan(plan).capabilities.lacking
    if preset and preset.gains and GAINS in lacking:
        facts.append(("gains", f"none, the nearest codes: --target {plan.target} has no gains"))
    if preset and preset.window and exact_tokens in lacking:
        in_files = "" if EXACT_WINDOW in lacking else " in folders; a converted .onnx file has them"
        facts.append((EXACT_WINDOW.name, f"none: --target {plan.target} has none{in_files}"))
    scaled = [layer for layer in plan.layers if layer.equalised]
    if scaled:
        text = f"scales of queries and keys{in_some(plan, scaled)}{_noise(equalisation, scaled)}"
        facts.append(("equalised", text))
    for feature in FEATURES:
        layers = feature.layers(plan)
        if feature.says is not None and layers:
            facts.append((feature.name, feature.says(plan, layers)))
    if calibration is not None:
        facts.append(("calibrated", reach(calibration)))
    return facts


def key_bias(norm: float) -> list[tuple[str, str]]:
    """Return the row of the biases of keys; none without any."""
    return [("key biases", f"norm up to {norm:.0f}, in the offsets")] if norm else []


def reach(calibration: CalibrationFacts) -> str:
    """Return how far a calibration reaches."""
    return f"on {calibration.tokens:,} tokens, for contexts of any length"


def warn(plan: Plan, equalisation: Sequence[LayerEqualisation]) -> None:
    """Say which layers have keys too coarse for their model."""
    from tq_onnx.conversion.equalise import SAFER_PRESET

    unsafe = [entry.layer for entry in equalisation if entry.unsafe]
    if unsafe:
        layers = [layer for layer in plan.layers if layer.layer in unsafe]
        terminal.print_line(
            f"note: the keys of {layer_names(layers)} are too uneven for {_kinds(layers)}: scores "
            f"get a noise of up to {max(entry.noise_after or 0.0 for entry in equalisation):.2f} "
            f"nats; --preset {SAFER_PRESET} is safer, and `tq-onnx report` measures it"
        )


def _kinds(layers: Iterable[LayerPlan]) -> str:
    return ", ".join(dict.fromkeys(str(layer.key.codec) for layer in layers))


def _preset(plan: Plan) -> str:
    if not any(codec.is_rotated for pair in plan.pairs for codec in pair):
        return plan.preset
    return f"{plan.preset}, {plan.rotation} rotation, seed {plan.seed}"


def _codecs(layer: LayerPlan) -> str:
    """Return codecs and bytes of a row, of both caches."""
    if layer.key.codec == layer.value.codec:
        return f"{layer.key.codec}, {layer.key.row_bytes} bytes a row"
    return (
        f"keys {layer.key.codec}, values {layer.value.codec}, "
        f"{layer.key.row_bytes} and {layer.value.row_bytes} bytes a row"
    )


def _noise(equalisation: Sequence[LayerEqualisation], layers: Sequence[LayerPlan]) -> str:
    """Return what scales do to the worst of some layers."""
    indices = {layer.layer for layer in layers}
    entries = [entry for entry in equalisation if entry.layer in indices and entry.noise_after]
    if not entries:
        return ""
    worst = max(entries, key=lambda entry: entry.noise_before or 0.0)
    return (
        f"; noise of a score {worst.noise_before:.3f} -> {worst.noise_after:.3f} nats at worst "
        f"(layer {worst.layer})"
    )
