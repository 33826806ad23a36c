"""Measure what a conversion gains in speed and memory."""
