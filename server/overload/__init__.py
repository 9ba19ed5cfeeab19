"""Overload: who is let in, who is told to come back and when, who has waited too long. On the event loop's thread."""
