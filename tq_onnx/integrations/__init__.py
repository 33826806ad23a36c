"""What connects tq-onnx with the files that other tools make: models, weights and tokenizers."""
