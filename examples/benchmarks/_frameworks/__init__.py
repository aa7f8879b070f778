"""Parts of `examples/benchmarks/frameworks.py`."""
