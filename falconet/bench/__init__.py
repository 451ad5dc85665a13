"""Benchmark specs, measurement, comparison."""
