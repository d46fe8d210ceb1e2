# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around the pure functions of the driver's installation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils import nvidia_driver


class FilterModule:
    """What Ansible loads; the names say whose they are."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "driver_kernels": nvidia_driver.choose_kernels,
            "driver_headers": nvidia_driver.name_headers,
            "driver_packages": nvidia_driver.choose_packages,
            "driver_installed": nvidia_driver.parse_installed,
            "driver_installed_version": nvidia_driver.installed_version,
            "driver_upstream": nvidia_driver.upstream_version,
            "driver_missing_builds": nvidia_driver.find_missing_builds,
            "driver_builds": nvidia_driver.driver_builds,
            "driver_explain_build": nvidia_driver.explain_build,
            "driver_explain_packages": nvidia_driver.explain_packages,
            "driver_log_paths": nvidia_driver.find_log_paths,
            "driver_enrolled": nvidia_driver.is_enrolled,
            "driver_mirror": nvidia_driver.find_mirror,
            "driver_host_problems": nvidia_driver.find_host_problems,
            "driver_source_problems": nvidia_driver.find_source_problems,
            "driver_chosen_versions": nvidia_driver.chosen_versions,
            "driver_comparison": nvidia_driver.compare_versions,
            "driver_loading": nvidia_driver.choose_loading,
            "driver_lost_cards": nvidia_driver.find_lost_cards,
            "driver_options_differ": nvidia_driver.options_differ,
            "driver_unloading": nvidia_driver.plan_unloading,
            "driver_options": nvidia_driver.merge_options,
            "driver_holds": nvidia_driver.packages_to_hold,
            "driver_limit_problems": nvidia_driver.find_limit_problems,
            "driver_judgement": nvidia_driver.judge_version,
        }
