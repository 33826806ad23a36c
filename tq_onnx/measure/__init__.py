"""Measure what a conversion changed: hard properties, quality and speed."""
