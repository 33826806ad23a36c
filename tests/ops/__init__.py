"""Tests of the operators as ONNX sees them: schemas and function bodies."""
