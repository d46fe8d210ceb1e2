"""Kernels for the sparse attention indexer of DeepSeek-V4.1, and the vLLM plugin that switches them on."""

__version__ = "0.1.0"
