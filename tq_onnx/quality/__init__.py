"""Measure the loss of quality by a conversion, and gather the statistics of a calibration."""
