"""The kernels on a node: built once per input in a container, and checked on its GPUs in the serving image.

Installed beside serving_image's own podman.py and errors.py, which keep their import path there.
"""
