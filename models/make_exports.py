"""Make the ONNX exports of a checkpoint by any route, each in its pinned environment.

An environment is a virtual environment with the packages of ``environments/NAME.txt``; it is made
when a route first needs it (about 1 GB each, most of it torch), and again after a pin has changed.

``OUT/ROUTE/`` receives each export, or ``OUT/ROUTE/FAMILY/`` with ``--families``: tiny models with
random weights (``families.py``). Arguments after ``--`` go to every recipe. The exit status is
``UNREACHABLE`` where pip reaches no package index, and 1 after any other failure.

Example::

    python models/make_exports.py legacy optimum exports
    python models/make_exports.py genai exports -- --precision int4 --ep cuda
    python models/make_exports.py mobius exports --families llama whisper
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).resolve().parent
ENVIRONMENTS = MODELS.parent / "build" / "environments"

#: Exit status where the packages cannot be had from here: sysexits.h calls it a temporary failure.
UNREACHABLE = 75

#: What pip says of a network that is not there.
NO_NETWORK = re.compile(
    "Failed to establish a new connection|connection broken by|Max retries exceeded|Read timed out"
)
#: What pip ends with when an index has not answered, as opposed to having no such version.
NO_ANSWER = re.compile(r"from versions: none|Max retries exceeded|Read timed out|Connection ?Error")


@dataclass(frozen=True)
class Route:
    """One way that users get their exports.

    Attributes:
        environment: name of the requirements file in ``environments/``.
        recipe: the script that exports.
        file: what the recipe writes to inside the export's folder; empty for the folder itself.
    """

    environment: str
    recipe: str
    file: str = ""


ROUTES = {
    "dynamo": Route("torch", "export_dynamo.py", "model.onnx"),
    "legacy": Route("torch", "export_legacy.py", "model.onnx"),
    "transformers": Route("torch", "export_transformers.py"),
    "genai": Route("torch", "export_genai.py"),
    "genai09": Route("transformers4", "export_genai.py"),
    "optimum": Route("transformers4", "export_optimum.py"),
    "mobius": Route("torch", "export_mobius.py"),
    "olive": Route("olive", "export_olive.py"),
}


class UnreachableError(RuntimeError):
    """No package index answers pip; the message is one sentence."""


def prepare(environment: str, folder: Path = ENVIRONMENTS) -> Path:
    """Return the environment's Python, making the environment in ``folder`` where it is not there.

    ``folder/NAME.txt`` is written last: the pins that the environment was made with.

    Raises:
        UnreachableError: no package index answered pip.
        SystemExit: it failed otherwise; the message ends with what it printed.
    """
    home, made_with = folder / environment, folder / f"{environment}.txt"
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pins = MODELS / "environments" / f"{environment}.txt"
    packages = pins.read_text(encoding="utf-8")
    if python.exists() and made_with.exists() and made_with.read_text(encoding="utf-8") == packages:
        return python
    made_with.unlink(missing_ok=True)
    if home.exists():
        shutil.rmtree(home)
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    install(python, pins)
    made_with.write_text(packages, encoding="utf-8")
    return python


def install(python: Path, pins: Path) -> None:
    """Install the packages of a requirements file; errors are those of ``prepare``."""
    # Nothing is compiled beforehand: of so many modules few are imported.
    options = ("install", "--quiet", "--no-compile", "--requirement", str(pins))
    process = subprocess.run(
        [str(python), "-m", "pip", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if process.returncode == 0:
        return
    if NO_NETWORK.search(process.stdout) and NO_ANSWER.search(process.stdout):
        raise UnreachableError(f"no package index answers pip for the packages of {pins.name}")
    raise SystemExit(f"pip could not install {pins.name}:\n{process.stdout[-4000:]}")


def run(script: str, python: Path, *arguments: str) -> None:
    """Run a script of this folder; what it prints is shown only if it fails.

    Raises:
        SystemExit: the script failed.
    """
    process = subprocess.run(
        [str(python), str(MODELS / script), *arguments],
        # The order of some exporters' names is that of a set.
        env=os.environ | {"PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        raise SystemExit(f"{script} {' '.join(arguments)} failed:\n{process.stdout[-4000:]}")


def export(
    route: str,
    model_dir: Path,
    output: Path,
    arguments: Sequence[str] = (),
    *,
    environments: Path = ENVIRONMENTS,
) -> None:
    """Export the checkpoint in ``model_dir`` by a route into the folder ``output``.

    Args:
        route: one of ``ROUTES``.
        model_dir: folder with ``config.json`` and ``model.safetensors``.
        output: folder for ``model.onnx`` (``prefill.onnx`` and ``decode.onnx`` for transformers).
        arguments: the recipe's own options.
        environments: folder of the virtual environments.

    Raises:
        UnreachableError: the environment is missing, and no package index answered pip.
        SystemExit: the recipe or pip failed; the message ends with what it printed.
    """
    entry = ROUTES[route]
    output.mkdir(parents=True, exist_ok=True)
    target = output / entry.file if entry.file else output
    python = prepare(entry.environment, environments)
    run(entry.recipe, python, str(model_dir), str(target), *arguments)


def main() -> None:
    """Run the command line."""
    own_arguments, arguments = sys.argv[1:], []
    if "--" in own_arguments:
        split = own_arguments.index("--")
        own_arguments, arguments = own_arguments[:split], own_arguments[split + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "routes", nargs="+", choices=ROUTES, metavar="ROUTE", help=", ".join(ROUTES)
    )
    parser.add_argument("output", type=Path, help="folder for the exports")
    parser.add_argument("--model", type=Path, default=MODELS / "qwen3-tiny", help="the checkpoint")
    parser.add_argument(
        "--families", nargs="+", default=[], metavar="NAME", help="of families.py, no checkpoint"
    )
    parser.add_argument(
        "--environments", type=Path, default=ENVIRONMENTS, help="folder of virtual environments"
    )
    parser.add_argument(
        "--only-environments", action="store_true", help="make what the routes need, export nothing"
    )
    options = parser.parse_args(own_arguments)
    for route in options.routes:
        folder = options.output / route
        try:
            if options.only_environments:
                prepare(ROUTES[route].environment, options.environments)
                continue
            if options.families:
                checkpoints = folder / "checkpoints"
                python = prepare(ROUTES[route].environment, options.environments)
                run("families.py", python, str(checkpoints), *options.families)
            models = [(checkpoints / name, folder / name) for name in options.families]
            for model, output in models or [(options.model, folder)]:
                export(route, model, output, arguments, environments=options.environments)
        except UnreachableError as error:
            print(error, file=sys.stderr)
            sys.exit(UNREACHABLE)
        for path in sorted(folder.rglob("*.onnx")):
            print(path, flush=True)


if __name__ == "__main__":
    main()
