"""A converted decoder for CANN's graph mode: standard ONNX, numbers for sizes, nothing else.

``passes`` holds the passes, ``claims`` what the provider takes. Everything else makes one of the
passes.
"""
