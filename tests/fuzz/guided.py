"""Cases that reach new code, by atheris: ``python -m tests.fuzz.guided LANE FILE ARGUMENTS``.

One process. What breaks a promise goes as a line of JSON into FILE, and fuzzing goes
on; what ends the process (a crash, too much memory, no answer) leaves its bytes beside that file.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.pool import Done, Limits, peak_bytes
from tests.fuzz.summary import Summary

SEEDS = 32
"""Strings of random bytes to begin with: each is a case, as all bytes are."""
LONGEST = 4096
LIMITS = Limits()
START_SECONDS = 600
"""To import what is instrumented, on a machine that does other things, too."""


def is_there() -> bool:
    """Whether atheris is installed, and of this Python and this system."""
    command = [sys.executable, "-c", "import atheris"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def fuzz(name: str, seconds: float, jobs: int, corpus: Path) -> Summary:
    """Runs processes for a time; what they find.

    Args:
        name: of the lane.
        seconds: how long.
        jobs: processes.
        corpus: a folder, whose cases come first and which takes those that reach new code.
    """
    corpus.mkdir(parents=True, exist_ok=True)
    for number in range(SEEDS):
        (corpus / f"seed-{number}").write_bytes(random.Random(number).randbytes(64 << number % 6))
    summary = Summary()
    with tempfile.TemporaryDirectory() as folder:
        homes = [Path(folder, str(job)) for job in range(jobs)]
        running = [_start(name, home, corpus, seconds, job) for job, home in enumerate(homes)]
        for process, home in zip(running, homes, strict=True):
            try:
                process.wait(seconds + START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _collect(summary, home, process.returncode)
    return summary


def _start(
    name: str, home: Path, corpus: Path, seconds: float, job: int
) -> subprocess.Popen[bytes]:
    home.mkdir()
    arguments = (
        *(f"-max_total_time={int(seconds)}", f"-max_len={LONGEST}", "-len_control=0"),
        *(f"-timeout={int(LIMITS.seconds)}", f"-rss_limit_mb={LIMITS.bytes >> 20}"),
        *(f"-artifact_prefix={home}/", f"-seed={job + 1}", "-reload=1", str(corpus)),
    )
    command = [sys.executable, "-m", "tests.fuzz.guided", name, str(home / "cases"), *arguments]
    with (home / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def _collect(summary: Summary, home: Path, code: int) -> None:
    """Takes what one process wrote."""
    cases = home / "cases"
    for line in cases.read_text().splitlines() if cases.exists() else ():
        summary.take(Done(**json.loads(line)), LIMITS.bytes)
    for path in home.iterdir():
        kind = path.name.partition("-")[0]
        if kind in ("crash", "oom", "timeout", "leak"):
            what = base64.b64encode(path.read_bytes()).decode()
            log = (home / "log").read_text(errors="replace")[-2000:]
            summary.take(Done(0, {"what": what}, 0, 0, f"{kind}: {log}"), LIMITS.bytes)
            return
    if code:
        log = (home / "log").read_text(errors="replace")[-2000:]
        summary.take(Done(0, {}, 0, 0, f"exit code {code}: {log}"), LIMITS.bytes)


def main() -> None:
    """Runs inside of one process."""
    import atheris

    name, cases = sys.argv[1], Path(sys.argv[2])
    with atheris.instrument_imports(include=["tq_onnx"], enable_loader_override=False):
        from tests.fuzz.draws import Bytes
        from tests.fuzz.lanes import lane
        from tests.remembering import remembering

        chosen = lane(name)
        chosen.warm()
    home = Path(tempfile.mkdtemp(dir=cases.parent))
    number = 0
    with cases.open("w") as lines, remembering():

        def one(data: bytes) -> None:
            nonlocal number
            shutil.rmtree(home)
            home.mkdir()
            begin = time.monotonic()
            answer = chosen.check(Bytes(data), home).answer
            if answer["problems"]:
                answer["what"] += f" {base64.b64encode(data).decode()}"
            done = Done(number, answer, time.monotonic() - begin, peak_bytes())
            lines.write(json.dumps(vars(done)) + "\n")
            lines.flush()
            number += 1

        atheris.Setup([sys.argv[0], *sys.argv[3:]], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
