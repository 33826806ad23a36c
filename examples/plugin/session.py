"""Open a converted model with the operator library as an execution provider; print its inputs."""

import sys

import onnxruntime as ort

library, model = sys.argv[1:]
ort.register_execution_provider_library("tq_onnx", library)  # once in a process
options = ort.SessionOptions()
devices = [d for d in ort.get_ep_devices() if d.ep_name == "TurboQuantExecutionProvider"]
options.add_provider_for_devices(devices, {})
session = ort.InferenceSession(model, options)
print(*(each.name for each in session.get_inputs()), sep="\n")
