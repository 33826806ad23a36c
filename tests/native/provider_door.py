"""What a process sees that registers the library as an execution provider; prints JSON.

It runs in a process of its own: a registration is of the whole process. With ``--time N`` it also
compares the time of N decode steps.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.library import get_library_path
from tq_onnx.runtime.session import RECORD_ASSIGNMENT, placement
from tq_onnx.runtime.signature import plan_of, signature_of

NAME = "tq_onnx"
PROVIDER = "TurboQuantExecutionProvider"
PROMPT = np.arange(2, 34)[None]


def session(model: Path, *doors: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.add_session_config_entry(RECORD_ASSIGNMENT, "1")
    for door in doors:
        if door == "operators":
            options.register_custom_ops_library(str(get_library_path()))
        if door == "device":
            devices = [d for d in onnxruntime.get_ep_devices() if d.ep_name == PROVIDER]
            options.add_provider_for_devices(devices, {})
    named = {"providers": [PROVIDER]} if "name" in doors else {}
    return onnxruntime.InferenceSession(str(model), options, **named)


def decoder(opened: onnxruntime.InferenceSession, capacity: int = 256) -> Decoder:
    return Decoder(opened, signature_of(opened, plan_of(opened)), capacity=capacity)


def logits(opened: onnxruntime.InferenceSession, steps: int = 8) -> bytes:
    running = decoder(opened)
    rows = [running.prefill(PROMPT)]
    rows += [running.step([token]) for token in range(3, 3 + steps)]
    return b"".join(row.tobytes() for row in rows)


def time_ratio(model: Path, steps: int) -> float:
    """Return how many times as long steps at 1,536 tokens take by the provider's door.

    The doors take turns, on one thread; the median of the pairs of processor times counts.
    """
    doors = ("operators", "device")
    running = {door: decoder(session(model, door), 1536 + steps) for door in doors}
    for each in running.values():
        each.prefill(np.arange(1536)[None] % 250 + 2)
    taken: dict[str, list[float]] = {door: [] for door in doors}
    for step in range(steps):
        for door in doors if step % 2 else reversed(doors):
            start = time.thread_time()
            running[door].step([5])
            taken[door].append(time.thread_time() - start)
    pairs = zip(taken["device"], taken["operators"], strict=True)
    return statistics.median(new / old for new, old in pairs)


def main(model: Path, steps: int = 0) -> None:
    found: dict[str, Any] = {"version": onnxruntime.__version__}
    plain = logits(session(model, "operators"))
    for turn in ("first", "second"):  # a library that was unloaded loads again
        onnxruntime.register_execution_provider_library(NAME, str(get_library_path()))
        devices = [d for d in onnxruntime.get_ep_devices() if d.ep_name == PROVIDER]
        found["devices"] = [str(device.device.type).rpartition(".")[2] for device in devices]
        doors = {"device": ("device",), "second": ("device",), "both": ("operators", "device")}
        opened = {kind: session(model, *through) for kind, through in doors.items()}
        placed, named = (placement(each) for each in (opened["device"], session(model, "name")))
        found[turn] = {
            "equal": {kind: logits(each) == plain for kind, each in opened.items()},
            "kernels": placed.encode + placed.attention,
            "kernels by name": named.encode + named.attention,
            "providers": placed.providers,
        }
        if steps and turn == "first":
            found["ratio"] = time_ratio(model, steps)
        del opened, devices
        onnxruntime.unregister_execution_provider_library(NAME)
        found["left"] = [d.ep_name for d in onnxruntime.get_ep_devices() if d.ep_name == PROVIDER]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[3]) if "--time" in sys.argv else 0)
