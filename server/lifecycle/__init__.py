"""How the process runs from the open port to its exit code."""
