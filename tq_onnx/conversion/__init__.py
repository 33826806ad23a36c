"""Converts a recognised decoder: plans, rewrites and checks it."""
