"""Reads and writes model files: refused before they are read, complete or not there at all."""
