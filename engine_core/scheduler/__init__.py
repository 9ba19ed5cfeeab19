"""The scheduler: a pure function of (state, events, now). Imports no torch."""
