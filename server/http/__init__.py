"""Connections and requests below the application: the port, parsers, limits, counting."""
