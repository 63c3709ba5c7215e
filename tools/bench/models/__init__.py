"""Models of the benchmarks: plain PyTorch, no parallelism inside, but for the one that is cut by hand to be the limit."""
