"""Rewrite a converted decoder for one kind of hardware. A target is a folder."""
