"""The command line: one file per command; nobody imports this package."""
