"""Hooks the kernels into the engine."""
