"""Kernels for vLLM's CPU backend: compiled by numba when they are built, run in torch's own team of threads."""
