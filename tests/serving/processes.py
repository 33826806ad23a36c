"""Servers in processes of their own, on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.serving.running import EXAMPLES

SECONDS = 600
"""Until a server answers, or has ended: a busy machine takes minutes to start Ray's processes."""
ENDING_SECONDS = 30
"""Until a server that was asked to end is killed, with all that it started: Ray may wait for itself
for ever."""
COMMANDS = {
    "serve": ("-m", "tq_onnx", "serve"),
    "ray": (
        *(str(Path(__file__).with_name("patient.py")), str(SECONDS)),
        str(EXAMPLES / "ray_serve.py"),
    ),
}
"""Servers, as Python runs them."""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@contextmanager
def serving(
    name: str, folder: Path, home: Path, *options: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Runs a server; yields its address and its process.

    Args:
        name: of ``COMMANDS``.
        folder: that it serves.
        home: a new folder for what it prints, and for what Ray leaves behind.
        options: of the server, more than template, address and threads.
    """
    home.mkdir()
    template = home / "chat.jinja"
    template.write_text(TEMPLATE)
    port = free_port()
    command = [
        *(sys.executable, *COMMANDS[name], str(folder), "--port", str(port)),
        *("--chat-template", str(template), "--threads", "1", *options),
    ]
    variables = {
        "PYTHONPATH": module_path(),
        # Nothing outside that folder, no word to anybody, and patience with a busy machine.
        "RAY_TMPDIR": str(home),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # by default replicas yield to all else that the machine does
        "RAY_raylet_start_wait_time_s": str(SECONDS),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(SECONDS),
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(SECONDS),
    }
    url = f"http://127.0.0.1:{port}"
    with answering(command, os.environ | variables, home, url) as process:
        yield url, process


@contextmanager
def answering(
    command: list[str], variables: Mapping[str, str], home: Path, url: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server; yields its process once it answers."""
    log = home / "log.txt"
    with log.open("w") as printed:
        process = subprocess.Popen(
            command, cwd=home, env=variables, stdout=printed, stderr=subprocess.STDOUT
        )
    try:
        assert _answers(url, process), f"no answer: {log.read_text()}"
        yield process
    finally:
        _end(process, home)


def _end(process: subprocess.Popen[bytes], home: Path) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _end_what_is_left(home)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def module_path() -> str:
    """Modules of this process, for those of others."""
    return os.pathsep.join(path for path in sys.path if path)


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Waits; false if the process has ended, or the time has."""
    for _ in range(SECONDS * 10):
        if process.poll() is not None:
            return False
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=SECONDS).status_code == 200:
                return True
        time.sleep(0.1)
    return False


def _end_what_is_left(home: Path) -> None:
    """Ends processes of Ray that outlived it, which know their folder."""
    mark = f"RAY_TMPDIR={home}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def processes_of(url: str, count: int) -> list[int]:
    """The processes that answer at an address, once there are so many."""
    found: set[int] = set()
    for _ in range(SECONDS * 20):
        answer = httpx.get(f"{url}/health", timeout=SECONDS)
        if answer.status_code == 200:
            found.add(answer.json()["process"])
        if len(found) == count:
            return sorted(found)
        time.sleep(0.05)
    raise AssertionError(f"{len(found)} of {count} answer")
