"""Kernels of the attention backends, each with a reference implementation and its test."""
