"""Serving over HTTP and gRPC."""
