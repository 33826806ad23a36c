"""Originals and their conversions in ONNX Runtime, side by side: ``python -m tests.agreement``."""
