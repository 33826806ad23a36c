"""Rewrites a converted decoder for one kind of hardware; a target is a folder."""
