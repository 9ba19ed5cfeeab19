"""Text and HTTP: everything between a client's socket and the engine's queues. One asyncio thread."""
