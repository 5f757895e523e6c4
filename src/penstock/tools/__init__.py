"""What surrounds the data path: benchmarks, the demo, reports."""
