"""Make the ONNX exports of a checkpoint by any route, each in its own pinned environment.

An environment is a virtual environment with the packages of ``environments/NAME.txt``; it is made
when a route first needs it (several hundred MB each, most of it torch). Delete its folder after a
pin has changed.

``OUT/ROUTE/`` receives each export. Arguments after ``--`` go to every recipe.

Example::

    python models/make_exports.py legacy optimum exports
    python models/make_exports.py genai exports -- --precision int4 --ep cuda
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).resolve().parent
ENVIRONMENTS = MODELS.parent / "build" / "environments"


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
    "genai09": Route("genai09", "export_genai.py"),
    "optimum": Route("optimum", "export_optimum.py"),
    "mobius": Route("mobius", "export_mobius.py"),
}


def prepare(environment: str, folder: Path = ENVIRONMENTS) -> Path:
    """Return the environment's Python, making the environment in ``folder`` if it is missing.

    Raises:
        subprocess.CalledProcessError: pip failed; nothing of the environment stays.
    """
    home = folder / environment
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        requirements = MODELS / "environments" / f"{environment}.txt"
        try:
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
            install = [str(python), "-m", "pip", "install", "--quiet"]
            subprocess.run([*install, "--requirement", str(requirements)], check=True)
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise
    return python


def run(script: str, python: Path, *arguments: str) -> None:
    """Run a script of this folder; what it prints is shown only if it fails.

    Raises:
        SystemExit: the script failed.
    """
    done = subprocess.run(
        [str(python), str(MODELS / script), *arguments],
        # The order of some exporters' names is that of a set.
        env=os.environ | {"PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{script} {' '.join(arguments)} failed:\n{done.stdout[-4000:]}")


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
        SystemExit: the recipe failed; the message ends with what it printed.
    """
    entry = ROUTES[route]
    output.mkdir(parents=True, exist_ok=True)
    target = output / entry.file if entry.file else output
    python = prepare(entry.environment, environments)
    run(entry.recipe, python, str(model_dir), str(target), *arguments)


def main() -> None:
    """Run the command line."""
    own, arguments = sys.argv[1:], []
    if "--" in own:
        split = own.index("--")
        own, arguments = own[:split], own[split + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "routes", nargs="+", choices=ROUTES, metavar="ROUTE", help=", ".join(ROUTES)
    )
    parser.add_argument("output", type=Path, help="folder for the exports")
    parser.add_argument("--model", type=Path, default=MODELS / "qwen3-tiny", help="the checkpoint")
    parser.add_argument(
        "--environments", type=Path, default=ENVIRONMENTS, help="folder of virtual environments"
    )
    options = parser.parse_args(own)
    for route in options.routes:
        folder = options.output / route
        export(route, options.model, folder, arguments, environments=options.environments)
        for path in sorted(folder.glob("*.onnx")):
            print(path, flush=True)


if __name__ == "__main__":
    main()
