"""The target ``ort-gqa``: ONNX Runtime's own caches of 8 or 4 bits, in its own operators."""
