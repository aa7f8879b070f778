"""What the benchmarks of this folder share: lengths, models, ways to run a batch, the update, and the tables."""
