"""A model behind HTTP: the protocol, batching, and the server."""
