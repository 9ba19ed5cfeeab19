"""Who may come in: keys, scopes, TLS, browsers."""
