"""Define the commands, one file for each. Only ``ascend``, which adds one, imports this room."""
