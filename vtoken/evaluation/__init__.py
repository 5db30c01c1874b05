"""Workloads, measured runs and the tables made of them. Nothing in this room imports vllm itself."""
