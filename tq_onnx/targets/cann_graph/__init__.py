"""A converted decoder for CANN's graph mode: standard ONNX, numbers for sizes, nothing else.

``tq_onnx.targets.cann_graph.target`` holds the row of the registry.
"""
