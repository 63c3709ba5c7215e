"""Models of the benchmarks: plain PyTorch, no parallelism inside."""
