"""Helpers of `examples/trl_grpo.py` and `examples/trl_sft_dpo.py`. Not part of the library."""
