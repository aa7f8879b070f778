"""Helpers of `examples/quickstart.py`: the model, the rows, and the report. Not part of the library."""
