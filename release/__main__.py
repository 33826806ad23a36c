"""Build, check and try what a release consists of.

Run it from the repository, with ``pip install -e '.[release]'``::

    python -m release                            # everything, for all platforms
    python -m release linux-x86_64 --tests       # one wheel, and its C++ tests
    python -m release --only-check               # wheels that are there already

The exit status is 1 if anything failed; what does not depend on it is done all the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from release import building, checking, emulating, trying
from release.building import ReleaseError
from tq_onnx.runtime.platforms import PLATFORMS, Platform, platform_here


class Steps:
    """The steps of a run, and how many of them failed."""

    def __init__(self) -> None:
        """Start without any."""
        self.failed = 0

    def take(self, name: str, step: Callable[[], object]) -> object:
        """Take a step and say what came of it; return None if it failed."""
        print(f"{name} ...", flush=True)
        try:
            outcome = step()
        except ReleaseError as error:
            self.failed += 1
            print(f"{name}: FAILED\n{error}", flush=True)
            return None
        print(f"{name}: {outcome}", flush=True)
        return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps that are asked for, and return the exit status."""
    options = _parser().parse_args(arguments)
    steps = Steps()
    chosen = building.platforms(options.platforms)
    source = None
    if not options.only_check:
        sdist = steps.take("source distribution", lambda: building.build_sdist(options.out))
        if not isinstance(sdist, Path):
            return 1
        source = building.unpack(sdist)
    for platform in chosen:
        if source is not None:
            wheel = steps.take(
                f"wheel {platform.name}",
                lambda item=platform: building.build_wheel(source, item, options.out),  # type: ignore[misc]
            )
            if wheel is None:
                continue
        steps.take(f"check {platform.name}", lambda item=platform: _check(options.out, item))  # type: ignore[misc]
        if options.tests and source is not None:
            steps.take(f"tests {platform.name}", lambda item=platform: _test(source, item.name))  # type: ignore[misc]
    if not options.no_environments:
        _try(steps, options.out, options.python)
    print(f"{steps.failed} steps failed" if steps.failed else "everything is as it should be")
    return 1 if steps.failed else 0


def _check(out: Path, platform: Platform) -> str:
    wheels = sorted(out.glob(f"*{platform.tag}.whl"))
    if len(wheels) != 1:
        raise ReleaseError(f"{out} has {len(wheels)} wheels of {platform.tag}")
    problems = checking.problems(wheels[0], platform)
    if problems:
        raise ReleaseError("\n".join(f"{wheels[0].name} {problem}" for problem in problems))
    return f"{wheels[0].name}, {wheels[0].stat().st_size:,} bytes"


def _test(source: Path, platform: str) -> str:
    said = emulating.run_tests(emulating.build_tests(source, platform), platform)
    return said or "built; nothing here runs them"


def _try(steps: Steps, out: Path, named: Sequence[Path]) -> None:
    this_platform = PLATFORMS.get(platform_here())
    wheels = sorted(out.glob(f"*{this_platform.tag}.whl")) if this_platform is not None else []
    if not wheels:
        print("no wheel of this platform is there to be tried")
        return
    with tempfile.TemporaryDirectory() as folder:
        for case in trying.cases(trying.find_pythons(named)):
            steps.take(
                f"try {case.name}",
                lambda item=case: trying.attempt(wheels[0], item, Path(folder) / "environment"),  # type: ignore[misc]
            )


def _platform(name: str) -> str:
    if name not in PLATFORMS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PLATFORMS)}")
    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "platforms",
        nargs="*",
        metavar="PLATFORM",
        type=_platform,
        help=f"{', '.join(PLATFORMS)}  [default: all]",
    )
    parser.add_argument(
        "--out", type=Path, default=building.ROOT / "dist", help="folder of the files (dist)"
    )
    parser.add_argument("--only-check", action="store_true", help="build nothing")
    parser.add_argument(
        "--tests", action="store_true", help="build the C++ tests, too, and run them where it goes"
    )
    parser.add_argument(
        "--no-environments", action="store_true", help="do not install the wheel of this platform"
    )
    parser.add_argument(
        "--python",
        type=Path,
        action="append",
        default=[],
        help="interpreter to try the wheel with; several times for several (those in PATH)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
