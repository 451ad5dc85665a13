"""Serving over HTTP."""
