"""The load generator: any OpenAI-compatible server, asked over raw sockets so that the client costs little."""
