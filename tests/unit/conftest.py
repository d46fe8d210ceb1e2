"""Makes `ansible_collections.serving.gpu_node` the checkout's own code in plain pytest."""

from __future__ import annotations

from pathlib import Path

from ansible.plugins.loader import init_plugin_loader
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[2]

# How long an example takes depends on what else the machine does; that is no finding.
settings.register_profile("unit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")

# Ansible's own import hook: the regular package `ansible_collections` in site-packages would hide the checkout.
init_plugin_loader([str(ROOT / "collections")])
