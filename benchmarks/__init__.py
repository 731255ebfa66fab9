"""Benchmarks and the demo: one script a question."""
