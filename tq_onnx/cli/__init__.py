"""The command line: one file for each command. Only a command that is elsewhere imports it."""
