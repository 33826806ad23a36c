"""The command line: one file for each command. Nothing imports this package."""
