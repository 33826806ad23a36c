"""Read and write model files: refuse hostile ones, write all of a model or nothing."""
