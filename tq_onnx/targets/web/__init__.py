"""A converted decoder for JavaScript runtimes: a graph of standard operators that opens fast.

``tq_onnx.targets.web.target`` holds the row of the registry.
"""
