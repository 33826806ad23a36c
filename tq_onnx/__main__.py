"""Run the command line as ``python -m tq_onnx``."""

from tq_onnx.cli.main import main

if __name__ == "__main__":
    main()
