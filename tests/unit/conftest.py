"""Makes `ansible_collections.serving.gpu_node` the checkout's own code in plain pytest."""

from __future__ import annotations

from pathlib import Path

from ansible.plugins.loader import init_plugin_loader

ROOT = Path(__file__).resolve().parents[2]

# Ansible's own import hook: the regular package `ansible_collections` in site-packages would hide the checkout.
init_plugin_loader([str(ROOT / "collections")])
