# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around the pure functions of serving images."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.serving.gpu_node.plugins.module_utils import (
    image_inputs,
    image_share,
    pack_settings,
    patch_series,
    sbom,
    sources,
)


def image_patches(series: list[dict[str, Any]], profile: str, package: str, version: str) -> list[str]:
    """Return the names of the patches that an image gets."""
    try:
        return patch_series.select_patches(series, profile, package, version)
    except patch_series.PatchError as error:
        raise AnsibleFilterError(str(error)) from None


def image_auths(registries: list[dict[str, str]]) -> str:
    """Return the text of a file of credentials as Podman and skopeo read it."""
    auths = {
        one["registry"]: {"auth": base64.b64encode(f"{one['username']}:{one['password']}".encode()).decode()}
        for one in registries
    }
    return json.dumps({"auths": auths}, indent=1, sort_keys=True) + "\n"


def image_pack_settings(text: str, file: str, environment: dict[str, str], settings: dict[str, Any]) -> list[str]:
    """Return how a pack's settings differ from a replica's, as lines.

    :param text: what is in the pack's file, and ``file`` its name.
    :param environment: a replica's.
    :param settings: the plan's.
    """
    found = pack_settings.parse_environment(text)
    compared = pack_settings.compare_environment(found.values, environment, settings)
    return pack_settings.describe_comparison(compared, found.unread, file)


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "image_auths": image_auths,
            "image_input_problems": image_inputs.input_problems,
            "image_key": image_inputs.image_key,
            "image_labels": image_inputs.image_labels,
            "image_maker": image_share.maker,
            "image_pack_settings": image_pack_settings,
            "image_nccl_problem": sbom.nccl_problem,
            "image_patches": image_patches,
            "image_pinned": image_inputs.pinned,
            "image_recipe_problems": sources.recipe_problems,
            "image_reference": image_inputs.parse_reference,
            "image_series_problems": patch_series.series_problems,
            "image_takers": image_share.takers,
        }
