"""Define the operators as ONNX sees them: names, schemas, function bodies."""
