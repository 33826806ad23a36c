"""Define the commands, one file for each. No other room imports this one."""
