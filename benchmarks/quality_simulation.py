"""What each preset costs, simulated in torch: an opinion that owes nothing to tq-onnx.

A causal model of transformers runs over windows of a text with every key (after rotary embedding)
and value quantised and dequantised before attention uses it, the token's own included. The formulas
are written down here from their sources and nothing of tq_onnx is imported, so that this can
disagree with the converted models; ``tq-onnx report`` on the same windows must give the same
figures within the noise of codes that are ties.

    python benchmarks/quality_simulation.py CHECKPOINT --text FILE --json FILE

Needs the environment of models/environments/torch.txt. One window of 1,024 tokens of a model of
135 M parameters takes some seconds per preset on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SEED = 42
Quantiser = Callable[[Tensor, int], Tensor]
"""Vectors ``[..., D]`` and the layer's index to vectors as they come back from the cache."""


def lloyd_max(bits: int, size: int) -> tuple[Tensor, Tensor]:
    """Centroids and boundaries for N(0, 1/d), by Lloyd's iteration with closed-form moments."""
    levels = 1 << bits
    centroids = torch.linspace(-2.5, 2.5, levels, dtype=torch.float64)
    for _ in range(20000):
        inner = (centroids[1:] + centroids[:-1]) / 2
        edges = torch.cat([torch.tensor([-40.0]), inner, torch.tensor([40.0])]).double()
        density = torch.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
        below = torch.special.ndtr(edges)
        moved = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
        change = (moved - centroids).abs().max()
        centroids = moved
        if change < 1e-13:
            break
    inner = (centroids[1:] + centroids[:-1]) / 2
    return centroids / math.sqrt(size), inner / math.sqrt(size)


def gaussian(size: int, seed: int) -> Tensor:
    """A square matrix of standard normals, as torch draws them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, size, generator=generator).double()


def rotation(kind: str, size: int, layer: int) -> Tensor:
    """The orthogonal matrix of a layer."""
    if kind == "qr":
        q, r = torch.linalg.qr(gaussian(size, SEED + 1000 * layer))
        return q * torch.sign(torch.diagonal(r))
    generator = torch.Generator().manual_seed(SEED + 1337 * layer)
    signs = (torch.randint(0, 2, (size,), generator=generator) * 2 - 1).double()
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        top, bottom = torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)
        matrix = torch.cat([top, bottom])
    return signs[:, None] * matrix / math.sqrt(size)


def half(x: Tensor) -> Tensor:
    """Rounded to float16."""
    return x.float().half().double()


class LloydMax:
    """Normalise, rotate, quantise every coordinate; ``corrected`` restores the norm."""

    def __init__(self, bits: int, kind: str, *, corrected: bool, exact_norm: bool = False) -> None:
        self.bits, self.kind, self.corrected, self.exact_norm = bits, kind, corrected, exact_norm
        self.rotations: dict[int, Tensor] = {}
        self.books: dict[int, tuple[Tensor, Tensor]] = {}

    def turn(self, size: int, layer: int) -> Tensor:
        """The layer's rotation, made once."""
        if layer not in self.rotations:
            self.rotations[layer] = rotation(self.kind, size, layer)
        return self.rotations[layer]

    def __call__(self, x: Tensor, layer: int) -> Tensor:
        """Quantise and dequantise vectors ``[..., D]``."""
        size = x.shape[-1]
        matrix = self.turn(size, layer)
        if size not in self.books:
            self.books[size] = lloyd_max(self.bits, size)
        centroids, boundaries = self.books[size]
        norm = x.norm(dim=-1, keepdim=True)
        y = (x / norm.clamp_min(1e-300)) @ matrix
        codes = centroids[torch.bucketize(y, boundaries, right=True)]
        scale = norm / codes.norm(dim=-1, keepdim=True) if self.corrected else norm
        scale = scale.float().double() if self.exact_norm else half(scale)
        return scale * codes @ matrix.T


class Prod:
    """One bit less of LloydMax, and the signs of a Gaussian projection of the residual."""

    def __init__(self, bits: int, kind: str) -> None:
        self.base = LloydMax(bits - 1, kind, corrected=False)
        self.sketches: dict[int, Tensor] = {}

    def __call__(self, x: Tensor, layer: int) -> Tensor:
        """Quantise and dequantise vectors ``[..., D]``."""
        size = x.shape[-1]
        if layer not in self.sketches:
            self.sketches[layer] = gaussian(size, SEED + 1000 * layer + 500)
        sketch = self.sketches[layer]
        decoded = self.base(x, layer)
        residual = x - decoded
        signs = torch.where(residual @ sketch.T >= 0, 1.0, -1.0).double()
        length = half(residual.norm(dim=-1, keepdim=True))
        return decoded + math.sqrt(math.pi / 2) / size * length * (signs @ sketch)


def uniform(bits: int) -> Quantiser:
    """Equal steps between the smallest and the largest coordinate of a vector."""

    def quantise(x: Tensor, _: int) -> Tensor:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step = (high - low) / ((1 << bits) - 1)
        codes = torch.round((x - low) / step.clamp_min(1e-300)).clamp(0, (1 << bits) - 1)
        return half(step) * codes + half(low)

    return quantise


def fp8(x: Tensor, _: int) -> Tensor:
    """E4M3FN, saturating."""
    return x.clamp(-448, 448).float().to(torch.float8_e4m3fn).double()


def blocks(bits: int) -> Quantiser:
    """ggml's q8_0, and q4_0 for comparison: signed steps, one float16 scale per 32 coordinates."""

    def quantise(x: Tensor, _: int) -> Tensor:
        groups = x.unflatten(-1, (-1, 32))
        if bits == 8:
            step = groups.abs().amax(-1, keepdim=True) / 127
            codes = torch.round(groups / step.clamp_min(1e-300))
        else:
            index = groups.abs().argmax(-1, keepdim=True)
            step = groups.gather(-1, index) / -8
            safe = torch.where(step == 0, torch.ones_like(step), step)
            codes = torch.floor(groups / safe + 8.5).clamp(0, 15) - 8
        return (half(step) * codes).flatten(-2)

    return quantise


def presets() -> dict[str, tuple[Quantiser, Quantiser]]:
    """Quantisers of keys and values."""

    def corrected(bits: int, kind: str = "qr") -> Quantiser:
        return LloydMax(bits, kind, corrected=True)

    def plain(bits: int, kind: str) -> Quantiser:
        return LloydMax(bits, kind, corrected=False)

    u8 = LloydMax(4, "qr", corrected=False, exact_norm=True)
    return {
        "int4": (corrected(4), corrected(4)),
        "int3": (corrected(3), corrected(3)),
        "int2": (corrected(2), corrected(2)),
        "k5v3": (corrected(5), corrected(3)),
        "k4v3": (corrected(4), corrected(3)),
        "k4v2": (corrected(4), corrected(2)),
        "prod4": (Prod(4, "qr"), Prod(4, "qr")),
        "prod3": (Prod(3, "qr"), Prod(3, "qr")),
        "k8v4": (fp8, uniform(4)),
        "4bit_nc": (corrected(4, "hadamard"), uniform(4)),
        "k3v4_nc": (corrected(3, "hadamard"), uniform(4)),
        "3bit_nc": (corrected(3, "hadamard"), uniform(3)),
        "safe-lowbit": (blocks(8), plain(4, "hadamard")),
        "balanced": (plain(4, "hadamard"), plain(4, "hadamard")),
        "experimental-max": (Prod(3, "hadamard"), Prod(3, "hadamard")),
        "ascend-u8": (u8, u8),
        "q8_0 / q8_0": (blocks(8), blocks(8)),
        "q4_0 / q4_0": (blocks(4), blocks(4)),
    }


class Statistics:
    """Means and energies of keys, values and queries of one layer, by position and over all."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Takes ``[heads, T, D]`` of one window."""
        self.count += 1
        grouped = query.unflatten(0, (key.shape[0], -1))
        statistics = {"k": key, "v": value, "k2": key**2, "q2": (grouped**2).mean(1)}
        for name, numbers in statistics.items():
            self.sums[name] = self.sums.get(name, 0) + numbers

    def offset(self, name: str, tokens: int, positions: int, *, zeros: bool) -> Tensor:
        """``[heads, tokens, D]``: means of the first positions, then the mean of all later ones."""
        means = self.sums[name] / self.count
        late = means[:, positions:].mean(1, keepdim=True)
        first = torch.zeros_like(means[:, :positions]) if zeros else means[:, :positions]
        return torch.cat([first, late.expand(-1, tokens - positions, -1)], 1)

    def scale(self, positions: int, *, centered: bool) -> Tensor:
        """``[heads, 1, D]``: (E (k - mean)^2 / E q^2)^(1/4), keys of the later positions."""
        means = {
            name: (self.sums[name] / self.count)[:, positions:].mean(1) for name in ("k", "k2")
        }
        energy = means["k2"] - (means["k"] ** 2 if centered else 0)
        queries = (self.sums["q2"] / self.count).mean(1)
        return (energy / queries).clamp_min(1e-12).pow(0.25)[:, None]


class Simulation:
    """What the attention of every layer does at the moment."""

    def __init__(self) -> None:
        self.gathered: list[Statistics] | None = None
        self.quantisers: tuple[Quantiser, Quantiser] | None = None
        self.statistics: list[Statistics] = []
        self.center: int | None = None
        self.zeros = False
        self.equalise = False

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _attention_mask: Tensor | None,
        *,
        scaling: float,
        **_: object,
    ) -> tuple[Tensor, None]:
        """An attention function of transformers: ``[B, H, T, D]`` to ``[B, T, H, D]``."""
        layer = int(module.layer_idx)
        if self.gathered is not None:
            self.gathered[layer].add(query[0].double(), key[0].double(), value[0].double())
        if self.quantisers is not None:
            key = self._cached(key, layer, 0)
            value = self._cached(value, layer, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    def _cached(self, vectors: Tensor, layer: int, role: int) -> Tensor:
        wide = vectors.double()
        offset = scale = None
        if self.center is not None:
            statistics = self.statistics[layer]
            name = "kv"[role]
            offset = statistics.offset(name, wide.shape[2], self.center, zeros=self.zeros)
            wide = wide - offset
        if self.equalise and role == 0:
            positions = 4 if self.center is None else self.center
            scale = self.statistics[layer].scale(positions, centered=self.center is not None)
            wide = wide / scale
        wide = self.quantisers[role](wide, layer)
        if scale is not None:
            wide = wide * scale
        if offset is not None:
            wide = wide + offset
        return wide.to(vectors.dtype)


def compare(model: torch.nn.Module, windows: Tensor, reference: list[Tensor]) -> dict[str, float]:
    """Perplexity, KL divergence and agreement; fills an empty ``reference``."""
    first = not reference
    loss = 0.0
    divergences, agreed = [], 0
    for index, window in enumerate(windows):
        scores = torch.log_softmax(model(window[None]).logits[0, :-1].float(), -1)
        loss -= scores.gather(1, window[1:, None]).double().sum().item()
        if first:
            reference.append(scores)
            continue
        expected = reference[index]
        divergences.append((expected.exp() * (expected - scores)).sum(-1).double())
        agreed += int((expected.argmax(-1) == scores.argmax(-1)).sum())
    count = windows.numel() - len(windows)
    figures = {"perplexity": math.exp(loss / count)}
    if not first:
        all_kl = torch.cat(divergences)
        figures["kl_mean"] = all_kl.mean().item()
        figures["kl_p99"] = all_kl.quantile(0.99).item()
        figures["kl_error"] = (all_kl.std() / math.sqrt(count)).item()
        figures["top1_agreement"] = agreed / count
    return figures


def variants() -> dict[str, dict[str, object]]:
    """Ways to make ``int4`` better with statistics, as attributes of the simulation."""
    return {
        "centered": {"center": 0},
        "centered, first 4 left alone": {"center": 4, "zeros": True},
        "centered, first 1 by its own mean": {"center": 1},
        "centered, first 4 by their own means": {"center": 4},
        "centered, first 16 by their own means": {"center": 16},
        "equalised": {"equalise": True},
        "centered (4, own means), equalised": {"center": 4, "equalise": True},
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("checkpoint", type=Path, help="folder with weights and tokenizer")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--calibration-windows", type=int, default=16)
    parser.add_argument(
        "--skip", type=int, default=8192, help="tokens before those to calibrate on"
    )
    parser.add_argument("--presets", nargs="*", help="by default all")
    parser.add_argument(
        "--calibrated", nargs="*", default=["int4"], help="presets to calibrate, too"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    simulation = Simulation()
    ALL_ATTENTION_FUNCTIONS.register("simulated", simulation.attend)
    model = AutoModelForCausalLM.from_pretrained(
        options.checkpoint, dtype=torch.float32, attn_implementation="simulated"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    ids = torch.tensor(tokenizer(options.text.read_text(encoding="utf-8"))["input_ids"])
    size = options.context
    windows = ids[: options.windows * size].view(-1, size)
    reference: list[Tensor] = []
    results = {"float32": compare(model, windows, reference)}
    print(f"float32 perplexity {results['float32']['perplexity']:.4f}", flush=True)
    table = presets()

    def run(name: str) -> None:
        figures = compare(model, windows, reference)
        figures["change"] = figures["perplexity"] / results["float32"]["perplexity"] - 1
        results[name] = figures
        print(
            f"{name:52} {figures['perplexity']:9.4f} {figures['change']:+8.2%}"
            f" KL {figures['kl_mean']:.4f} +- {figures['kl_error']:.4f} p99 {figures['kl_p99']:.3f}"
            f" top-1 {figures['top1_agreement']:.3f}",
            flush=True,
        )
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")

    if options.calibrated:
        simulation.gathered = [Statistics() for _ in range(model.config.num_hidden_layers)]
        for start in range(options.skip, options.skip + options.calibration_windows * size, size):
            model(ids[None, start : start + size])
        simulation.statistics, simulation.gathered = simulation.gathered, None
    for name in options.calibrated:
        simulation.quantisers = table[name]
        for text, changes in variants().items():
            for key, setting in changes.items():
                setattr(simulation, key, setting)
            run(f"{name} {text}")
            simulation.center, simulation.zeros, simulation.equalise = None, False, False
    for name in options.presets if options.presets is not None else table:
        simulation.quantisers = table[name]
        run(name)


if __name__ == "__main__":
    main()
