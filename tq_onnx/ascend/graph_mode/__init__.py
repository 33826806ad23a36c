"""A converted decoder for CANN's graph mode: standard ONNX, numbers for sizes, nothing else.

``tq_onnx.ascend.graph_mode_target`` holds the row of the registry.
"""
