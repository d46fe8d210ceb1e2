"""Artifacts on a node: fetched once, verified byte for byte, resumable.

Installed below /usr/local/lib/gpu-node beside the collection's own artifact_store.py, listing.py, manifest.py and
tiny_model.py, which keep their import path there. Only ``worker`` needs more than Python itself; it runs with the
Python of a virtual environment that has huggingface_hub.
"""
