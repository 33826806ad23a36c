"""Measure what a conversion costs in quality, and gather what calibrates it."""
