"""Kernels for GPUs, in Triton: checked in its interpreter and compiled for sm_90; not yet run on hardware."""
