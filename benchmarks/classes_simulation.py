"""What rows with classes of coordinates cost, simulated in torch before any operator has them.

A causal model of transformers runs over windows of a text. Every token takes the newest tokens and
the first ones exactly, and of all others what rows of ``tq_onnx.codec.classes`` say, whose matrices
and error feedback come from statistics of another part of the text, or of another text. The encoder
here is one of its own, for all gains at once. Before it runs in float32, it codes some keys and
values of the first layer in float64, and their rows have to be the oracle's.

    python benchmarks/classes_simulation.py CHECKPOINT --text FILE --json FILE

Needs the environment of models/environments/torch.txt. Eight windows of 1,024 tokens of a model of
135 M parameters take some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tq_onnx.codec.classes import (
    KEYS_2_5,
    KEYS_2_75,
    STEPS_PER_OCTAVE,
    USUAL_SCALE,
    VALUES_2_5,
    VALUES_2_75,
    Classes,
    Matrices,
    Part,
    class_feedback,
    key_matrices,
    quantise_classes,
    value_matrices,
)
from tq_onnx.codec.feedback import factors
from tq_onnx.codec.search import gain_table

FORMS = {"2.5": (KEYS_2_5, VALUES_2_5), "2.75": (KEYS_2_75, VALUES_2_75)}
GAINS = torch.tensor(gain_table())
TINY = 1e-30
CHECKED_TOKENS = 32


class Statistics:
    """Sums over the tokens of one layer: of queries all, of keys and values those behind the sinks.

    Args:
        sinks: how many of the first tokens of a window are left out.
    """

    def __init__(self, sinks: int) -> None:
        self._sinks = sinks
        self._tokens = self._queries = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Take ``[heads, T, D]`` of one window."""
        late_key, late_value = (each[:, self._sinks :].double() for each in (key, value))
        grouped = query.double().reshape(len(key), -1, query.shape[-1])
        self._tokens += late_key.shape[1]
        self._queries += grouped.shape[1]
        found = {
            "key": late_key.sum(1),
            "key_energy": (late_key**2).sum(1),
            "value": late_value.sum(1),
            "value_products": late_value.mT @ late_value,
            "query_products": grouped.mT @ grouped,
        }
        for name, numbers in found.items():
            self._sums[name] = self._sums.get(name, 0) + numbers

    def mean(self, name: str) -> Tensor:
        """Return the mean of one of the sums."""
        count = self._queries if name == "query_products" else self._tokens
        return self._sums[name] / count

    def of_keys(self) -> tuple[Tensor, Tensor]:
        """Return variances of keys and squares of queries, ``[N, D]``."""
        variance = self.mean("key_energy") - self.mean("key") ** 2
        return variance, self.mean("query_products").diagonal(dim1=1, dim2=2)

    def of_values(self) -> Tensor:
        """Return the covariance of the values, ``[N, D, D]``."""
        mean = self.mean("value")
        return self.mean("value_products") - mean[:, :, None] * mean[:, None, :]


@dataclass
class Encoder:
    """The encoder of one cache, and what its rows mean."""

    classes: Classes
    matrices: Matrices
    offset: Tensor
    feedback: tuple[np.ndarray, np.ndarray] | None = None
    clamped: int = 0
    stored: int = 0
    is_checked: bool = False
    _factors: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Take the factors of the matrices of feedback."""
        self._encode, self._read = map(torch.tensor, (self.matrices.encode, self.matrices.read))
        for matrix in self.feedback or ():
            lower, weights = map(torch.tensor, factors(matrix))
            self._factors.append((lower, weights))

    def codes(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the codes of both classes of vectors ``[N, T, D]``, and their stored scales."""
        norm = x.norm(dim=-1, keepdim=True)
        turned = (x / norm.clamp_min(TINY)) @ self._encode.to(x.dtype)
        codes, scales = [], []
        for index, part in enumerate(self.classes.parts(x.shape[-1])):
            y = turned[..., part.coordinates]
            length = y.norm(dim=-1, keepdim=True)
            unit = y / length.clamp_min(TINY)
            found, factor = self._search(unit, part, index)
            scale = (norm * length)[..., 0] * factor
            place = STEPS_PER_OCTAVE * torch.log2(scale.clamp_min(TINY))
            exact = place.round() + USUAL_SCALE
            kept = exact.clamp(1, 255)
            self.clamped += int((exact != kept).sum())
            self.stored += kept.numel()
            codes.append(found)
            scales.append(torch.where(scale > 0, kept, 0))
        return codes, scales

    def decoded(self, x: Tensor) -> Tensor:
        """Return what rows of vectors ``[N, T, D]`` mean, offset included."""
        codes, scales = self.codes((x - self.offset).float())
        numbers = []
        for part, code, scale in zip(self.classes.parts(x.shape[-1]), codes, scales, strict=True):
            size = torch.exp2((scale - USUAL_SCALE) / STEPS_PER_OCTAVE)
            size = torch.where(scale > 0, size, 0)
            numbers.append(size[..., None] * torch.tensor(part.codebook.centroids)[code])
        return torch.cat(numbers, dim=-1) @ self._read.mT + self.offset

    def check(self, x: Tensor) -> None:
        """Compare rows with the oracle's.

        Raises:
            SystemExit: they differ.
        """
        self.is_checked = True
        some = (x - self.offset)[:, :CHECKED_TOKENS].double()
        codes, scales = self.codes(some)
        wanted = quantise_classes(some.numpy(), self.classes, self.matrices, feedback=self.feedback)
        same = (torch.cat(codes, dim=-1).numpy() == wanted.codes).all(axis=-1)
        same &= (torch.stack(scales, dim=-1).numpy() == wanted.scales).all(axis=-1)
        if not same.all():
            raise SystemExit(f"{(~same).mean():.1%} of the rows are not those of the oracle")

    def _search(self, unit: Tensor, part: Part, index: int) -> tuple[Tensor, Tensor]:
        """Return the best codes of unit vectors, and the factor of the unbiased scale."""
        kind = unit.dtype
        centroids = torch.tensor(part.codebook.centroids, dtype=kind)
        boundaries = torch.tensor(part.codebook.boundaries, dtype=kind)
        gains = GAINS[:, None, None].to(kind)
        if not self._factors:
            codes = torch.bucketize(unit * gains[..., None], boundaries, right=True)
            turned, own_turned, weights = centroids[codes], unit, torch.ones((), dtype=kind)
        else:
            lower, weights = (each.to(kind) for each in self._factors[index])
            numbers = unit.expand(len(GAINS), *unit.shape).clone()
            codes = torch.empty(numbers.shape, dtype=torch.long)
            for j in reversed(range(unit.shape[-1])):
                tried = (numbers[..., j] * gains).contiguous()
                codes[..., j] = torch.bucketize(tried, boundaries, right=True)
                error = centroids[codes[..., j]] / gains - unit[..., j]
                numbers[..., :j] -= error[..., None] * lower[:, None, j, :j]
            turned, own_turned, weights = centroids[codes] @ lower, unit @ lower, weights[:, None]
        along = (turned * own_turned * weights).sum(-1)
        square = (turned**2 * weights).sum(-1)
        own = (own_turned**2 * weights).sum(-1)
        best = (along.clamp_min(0) ** 2 / square).argmax(0, keepdim=True)
        product = along.gather(0, best)[0]
        chosen = codes.gather(0, best[..., None].expand(1, *unit.shape))[0]
        return chosen, torch.where(product > 0, own / product.clamp_min(TINY), 0)


class Simulation:
    """What the attention of every layer does at the moment.

    Args:
        window: how many of the newest tokens are exact.
        sinks: how many of the first tokens are exact.
    """

    def __init__(self, window: int, sinks: int) -> None:
        self.gathered: list[Statistics] | None = None
        self.encoders: list[tuple[Encoder, Encoder]] | None = None
        self._window, self._sinks = window, sinks

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
        """An attention function of transformers: ``[1, H, T, D]`` to ``[1, T, H, D]``."""
        layer = int(module.layer_idx)
        if self.gathered is not None:
            self.gathered[layer].add(query[0], key[0], value[0])
        grouped = query[0].unflatten(0, (key.shape[1], -1))
        exact_key, exact_value = key[0][:, None], value[0][:, None]
        at = torch.arange(query.shape[2])
        hidden = at[None] > at[:, None]
        scores = grouped @ exact_key.mT * scaling
        if self.encoders is None:
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out = weights @ exact_value
        else:
            of_keys, of_values = self.encoders[layer]
            for encoder, vectors in ((of_keys, key[0]), (of_values, value[0])):
                if layer == 0 and not encoder.is_checked:
                    encoder.check(vectors)
            near = (at[:, None] - at[None] < self._window) | (at[None] < self._sinks)
            coded = grouped @ of_keys.decoded(key[0])[:, None].mT * scaling
            scores = torch.where(near, scores, coded).masked_fill(hidden, -torch.inf)
            weights = scores.softmax(-1)
            out = weights.masked_fill(~near, 0) @ exact_value
            out = out + weights.masked_fill(near, 0) @ of_values.decoded(value[0])[:, None]
        return out.flatten(0, 1)[None].transpose(1, 2).contiguous(), None


def encoders(
    statistics: list[Statistics], name: str, seed: int, *, feeds_back: bool
) -> list[tuple[Encoder, Encoder]]:
    """Return the encoders of keys and values of every layer."""
    keys, values = FORMS[name]
    made = []
    for layer, found in enumerate(statistics):
        variance, energy = (each.numpy() for each in found.of_keys())
        of_keys = key_matrices(variance, energy, keys, layer=layer, seed=seed, kind="qr")
        covariance = found.of_values().numpy()
        of_values = value_matrices(covariance, values, layer=layer, seed=seed, kind="qr")
        queries = found.mean("query_products").numpy()
        feedback = class_feedback(queries, of_keys, keys) if feeds_back else None
        offsets = [found.mean(each)[:, None].float() for each in ("key", "value")]
        made.append(
            (
                Encoder(keys, of_keys, offsets[0], feedback),
                Encoder(values, of_values, offsets[1]),
            )
        )
    return made


def figures(
    reference: list[Tensor], losses: list[Tensor], divergences: list[Tensor]
) -> dict[str, float]:
    """Return what windows cost: losses ``[T]`` of the original and of the rows, divergences."""
    change = torch.cat(losses) - torch.cat(reference)
    all_kl = torch.cat(divergences)
    late = torch.cat([each[len(each) // 2 :] for each in divergences])
    count = math.sqrt(len(change))
    return {
        "windows": len(losses),
        "original_perplexity": float(torch.cat(reference).mean().exp()),
        "change": float(change.mean().exp()) - 1,
        "change_error": float(change.std()) / count,
        "kl_mean": float(all_kl.mean()),
        "kl_error": float(all_kl.std()) / count,
        "kl_second_half": float(late.mean()),
    }


def run(
    model: torch.nn.Module,
    simulation: Simulation,
    windows: Tensor,
    variants: dict[str, list[tuple[Encoder, Encoder]]],
) -> dict[str, dict[str, float]]:
    """Run all variants over all windows, and tell what each costs so far after every window."""
    reference: list[Tensor] = []
    found: dict[str, tuple[list[Tensor], list[Tensor]]] = {name: ([], []) for name in variants}
    results: dict[str, dict[str, float]] = {}

    def log_probabilities(window: Tensor) -> Tensor:
        return torch.log_softmax(model(window[None]).logits[0, :-1].float(), -1)

    for window in windows:
        following = window[1:, None]
        simulation.encoders = None
        own = log_probabilities(window)
        reference.append(-own.gather(1, following)[:, 0].double())
        for name, of_layers in variants.items():
            simulation.encoders = of_layers
            scores = log_probabilities(window)
            losses, divergences = found[name]
            losses.append(-scores.gather(1, following)[:, 0].double())
            divergences.append((own.exp() * (own - scores)).sum(-1).double())
            figure = figures(reference, losses, divergences)
            caches = [cache for layer in of_layers for cache in layer]
            figure["clamped"] = sum(each.clamped for each in caches) / sum(
                each.stored for each in caches
            )
            results[name] = figure
            print(
                f"{figure['windows']} windows, {name:5} bits: {figure['change']:+.2%}"
                f" +- {figure['change_error']:.2%}, KL {figure['kl_mean']:.5f}"
                f" +- {figure['kl_error']:.5f}, second half {figure['kl_second_half']:.5f},"
                f" clamped {figure['clamped']:.1e}",
                flush=True,
            )
    return results


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("checkpoint", type=Path, help="folder with weights and tokenizer")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--calibration-text", type=Path, help="by default the same one, behind")
    parser.add_argument("--calibration-windows", type=int, default=16)
    parser.add_argument("--calibration-context", type=int, default=1024)
    parser.add_argument("--skip", type=int, default=32768, help="tokens before those of the text")
    parser.add_argument("--bits", nargs="*", choices=[*FORMS], default=[*FORMS])
    parser.add_argument("--window", type=int, default=64, help="newest tokens that are exact")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that are exact")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--no-feedback", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    simulation = Simulation(options.window, options.sinks)
    ALL_ATTENTION_FUNCTIONS.register("classes", simulation.attend)
    model = AutoModelForCausalLM.from_pretrained(
        options.checkpoint, dtype=torch.float32, attn_implementation="classes"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)

    def windows_of(text: Path, skip: int, count: int, size: int) -> Tensor:
        ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8"))["input_ids"])[skip:]
        return ids[: min(count, len(ids) // size) * size].view(-1, size)

    given = options.calibration_text
    calibration = windows_of(
        given or options.text,
        0 if given else options.skip,
        options.calibration_windows,
        options.calibration_context,
    )
    layers = model.config.num_hidden_layers
    statistics = [Statistics(options.sinks) for _ in range(layers)]
    simulation.gathered = statistics
    for window in calibration:
        model(window[None], logits_to_keep=1)
    simulation.gathered = None
    variants = {
        bits: encoders(statistics, bits, options.seed, feeds_back=not options.no_feedback)
        for bits in options.bits
    }
    windows = windows_of(options.text, 0, options.windows, options.context)
    results = run(model, simulation, windows, variants)
    if options.json:
        facts = {name: str(value) for name, value in vars(options).items()}
        document = {"options": facts, "calibration_windows": len(calibration), "results": results}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
