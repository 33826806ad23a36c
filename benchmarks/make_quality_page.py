"""Write docs/quality.md: what every preset costs, on two models, each figure below its command.

The commands on the page are the ones that this script runs, in a folder that is given: first they
make the models, then ``tq-onnx report`` measures them, and what it writes becomes the section. A
conversion that is there already is used again. With 18 presets the large model takes about an hour
on two cores, and 5 GB of disk for a while.

Examples::

    python benchmarks/make_quality_page.py work --text wiki.valid.txt
    python benchmarks/make_quality_page.py work --only qwen3-tiny       # that section alone
    python benchmarks/make_quality_page.py work --text wiki.valid.txt --smollm2 smollm2

``--smollm2`` names what ``models/export_smollm2.py`` wrote; without it the script runs that, too,
which needs torch (see the recipe). Sections that are not made again keep what was measured before:
it lies in ``FOLDER/NAME.md``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tq_onnx.codec.presets import PRESETS

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
PAGE = DOCS / "quality.md"
QWEN, SMOLLM = "qwen3-tiny", "smollm2"
CALIBRATION = "smollm2.calibration.safetensors"
CALIBRATED = ("int4", "int3", "k5v3")

INTRODUCTION = """\
# What each preset costs

Written by `python benchmarks/make_quality_page.py`. Every table is the output of the command above
it.

Every model reads the text through onnxruntime, in windows that begin with empty caches. Every key
and value is written to its cache and read back from there, the token's own included. Windows stand
side by side, and every prediction inside them counts. The original is the same file before its
conversion, in float32. The figures are of centroids before they were rounded to integers for int8,
which raises the KL divergence of int4 by less than its standard error
([docs/presets.md](presets.md)).
"""

# What quality_simulation.py calls a conversion that has another name here.
SIMULATED = {"int4-calibrated": "int4 centered (4, own means), equalised"}

SIMULATION = """\
## Against an independent simulation

SmolLM2 on the same windows, simulated in torch by formulas written down a second time
(`benchmarks/quality_simulation.py CHECKPOINT --text wikitext2-valid.txt --windows 6 --json FILE`).
The last column is the difference of the KL divergences in standard errors. Perplexities scatter
more, because rounding differs between the two. A coordinate that falls on the other side of a
boundary changes all layers above it. From some layer on the two have noise of the same size, but
not the same noise.

| conversion | perplexity | simulated | KL mean | simulated | difference |
|---|---|---|---|---|---|"""

ABOUT = {
    QWEN: "## The bundled Qwen3: 4 layers, head size 128\n\nA small model that was really trained. "
    "It has not seen the text. It says little about large models, but anyone can repeat the "
    "measurement in a minute.",
    SMOLLM: "## SmolLM2-135M-Instruct: 30 layers, head size 64\n\nA language model with trained "
    "weights, on the validation text of WikiText-2. Head size 64 is harder than 128: the metadata "
    "of a row weighs twice as much, and coordinates are further from the normal distribution.",
}


@dataclass(frozen=True)
class Section:
    """One model on the page.

    Attributes:
        name: of its folder, its picture and its measured piece.
        make: commands that make its original and what conversions need, each with its product.
        conversions: names and options of ``tq-onnx convert``, besides those of the presets.
        report: arguments of ``tq-onnx report`` besides the models.
    """

    name: str
    make: tuple[tuple[tuple[str, ...], str], ...]
    conversions: dict[str, tuple[str, ...]]
    report: tuple[str, ...]


def main() -> None:
    """Run what was asked for and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the models go")
    parser.add_argument("--text", type=Path, help="the validation text of WikiText-2")
    parser.add_argument("--smollm2", type=Path, help="an export that exists")
    parser.add_argument("--only", choices=(QWEN, SMOLLM), help="measure one section only")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), help="default: all")
    parser.add_argument(
        "--convert",
        action="append",
        default=[],
        metavar="NAME=OPTIONS",
        help="one more conversion, e.g. 'int4-b2=--preset int4 --boundary-layers 2'",
    )
    parser.add_argument("--simulation", type=Path, help="what quality_simulation.py wrote")
    parser.add_argument("--tokens", default="6144", help="of the large model's text")
    parser.add_argument("--threads", default="2")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    conversions = {name: ("--preset", name) for name in options.presets}
    for entry in options.convert:
        name, _, words = entry.partition("=")
        conversions[name] = tuple(shlex.split(words))
    for section in sections(options):
        if options.only in (None, section.name):
            measure(section, conversions | section.conversions, options.folder)
    pieces = [
        f"{ABOUT[name]}\n\n{(options.folder / f'{name}.md').read_text(encoding='utf-8')}"
        for name in (QWEN, SMOLLM)
        if (options.folder / f"{name}.md").is_file()
    ]
    if options.simulation is not None:
        pieces.append(against_simulation(options.folder, options.simulation))
    PAGE.write_text("\n".join([INTRODUCTION, *pieces]), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(REPOSITORY)}")


def against_simulation(folder: Path, simulation: Path) -> str:
    """The section that puts the measured figures beside those of quality_simulation.py."""
    simulated = json.loads(simulation.read_text(encoding="utf-8"))
    measured = json.loads((folder / f"{SMOLLM}.json").read_text(encoding="utf-8"))
    rows = []
    for model in measured["models"]:
        name = Path(model["path"]).name.removeprefix("model.").removesuffix(".onnx")
        found = simulated.get(SIMULATED.get(name, name))
        if found is None:
            continue
        quality = model["quality"]
        error = (quality["kl_error"] ** 2 + found["kl_error"] ** 2) ** 0.5
        rows.append(
            f"| {name} | {quality['perplexity_change']:+.1%} | {found['change']:+.1%} "
            f"| {quality['kl_mean']:.4f} | {found['kl_mean']:.4f} "
            f"| {(quality['kl_mean'] - found['kl_mean']) / error:+.1f} |"
        )
    return "\n".join([SIMULATION, *rows, ""])


def sections(options: argparse.Namespace) -> list[Section]:
    """The models of the page, as far as they can be measured."""
    threads = ("--threads", options.threads)
    model = f"{QWEN}/model.onnx"
    tiny = ((("tq-onnx", "demo", "--keep", QWEN), model),)
    found = [Section(QWEN, tiny, {}, ("--tokens", "8192", *threads))]
    if options.only != QWEN:
        if options.text is None:
            raise SystemExit("the text of WikiText-2 is missing: name it with --text")
        text = options.folder / "wikitext2-valid.txt"
        shutil.copyfile(options.text, text)
        if options.smollm2 is not None and not (options.folder / SMOLLM).exists():
            (options.folder / SMOLLM).symlink_to(options.smollm2.resolve())
        model = f"{SMOLLM}/model.onnx"
        read = ("--text", text.name, *threads)
        # The statistics come from text behind what is measured.
        calibrate = ("tq-onnx", "calibrate", model, *read, "--skip", "8192", "-o", CALIBRATION)
        make = (
            (("python", str(REPOSITORY / "models" / "export_smollm2.py"), SMOLLM), model),
            (calibrate, CALIBRATION),
        )
        calibrated = {
            f"{name}-calibrated": ("--preset", name, "--calibration", CALIBRATION)
            for name in CALIBRATED
        } | {"int4-boundary2": ("--preset", "int4", "--boundary-layers", "2")}
        found.append(Section(SMOLLM, make, calibrated, (*read, "--tokens", options.tokens)))
    return found


def measure(section: Section, conversions: dict[str, tuple[str, ...]], folder: Path) -> None:
    """Make the models of a section, measure them, and write ``FOLDER/NAME.md``."""
    shown: list[str] = []
    original = f"{section.name}/model.onnx"
    for command, product in section.make:
        run(command, folder, shown, unless=folder / product)
    models = []
    for name, words in conversions.items():
        models.append(f"{section.name}/model.{name}.onnx")
        run(
            ("tq-onnx", "convert", original, *words, "-o", models[-1], "--overwrite"), folder, shown
        )
    picture = f"quality-{section.name}.svg"
    piece = f"{section.name}.report.md"
    outputs = ("--picture", picture, "--markdown", piece)
    command = ("tq-onnx", "report", original, *models, *section.report, *outputs, "--json")
    run(command, folder, shown, into=folder / f"{section.name}.json")
    shutil.copyfile(folder / picture, DOCS / picture)
    commands = "\n".join(["```sh", *shown, "```"])
    measured = (folder / piece).read_text(encoding="utf-8")
    (folder / f"{section.name}.md").write_text(f"{commands}\n\n{measured}", encoding="utf-8")


def run(
    command: Sequence[str],
    folder: Path,
    shown: list[str],
    *,
    unless: Path | None = None,
    into: Path | None = None,
) -> None:
    """Run a command in the folder, unless what it makes is there, and note how it is shown.

    Args:
        command: a program and its arguments.
        folder: where it runs.
        shown: receives the line for the page.
        unless: what it makes; if that exists, it is not run.
        into: file for what it prints.
    """
    line = shlex.join(word.removeprefix(f"{REPOSITORY}/") for word in command)
    line += "" if into is None else f" > {into.name}"
    shown.append(line)
    if unless is not None and unless.exists():
        return
    print(f"$ {line}", flush=True)
    programs = {
        "tq-onnx": [sys.executable, "-c", "from tq_onnx.cli.main import main; main()"],
        "python": [sys.executable],
    }
    words = [*programs[command[0]], *command[1:]]
    if into is None:
        subprocess.run(words, cwd=folder, check=True)
        return
    with into.open("wb") as file:
        subprocess.run(words, cwd=folder, check=True, stdout=file)


if __name__ == "__main__":
    main()
