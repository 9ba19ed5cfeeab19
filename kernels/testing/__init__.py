"""Strict stand-ins for what a GPU brings: they prove on a CPU what could only be seen to fail on a card."""
