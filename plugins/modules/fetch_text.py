#!/usr/bin/python
# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Fetch a small text over HTTP, through a proxy whose password nobody sees."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: fetch_text
short_description: Fetch a small text over HTTP, through a proxy whose password nobody sees
version_added: "0.2.0"
description:
  - For the keys of package sources. What a task hands over by C(environment) stands on the node's command line and in
    the output of C(-vvv); what a module is given as a secret stands in neither.
options:
  url:
    description: What to fetch.
    type: str
    required: true
  proxy:
    description: URL of the HTTP proxy; it may hold a password. Empty asks the host itself.
    type: str
    default: ""
  no_proxy:
    description: Hosts that are reached without it, separated by commas.
    type: str
    default: ""
  timeout:
    description: Seconds until an answer must begin.
    type: int
    default: 60
extends_documentation_fragment: [serving.gpu_node.reads_only]
author: The gpu_node authors (@gpu-node)
"""

EXAMPLES = r"""
- name: Fetch a key
  serving.gpu_node.fetch_text:
    url: https://nvidia.github.io/libnvidia-container/gpgkey
    proxy: "{{ package_access_proxy }}"
"""

RETURN = r"""
content:
  description: The text.
  returned: success
  type: str
"""

import os
import ssl
import urllib.error

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import ConnectionError as UrlsConnectionError
from ansible.module_utils.urls import open_url

_LARGEST = 1024**2


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "proxy": {"type": "str", "default": "", "no_log": True},
            "no_proxy": {"type": "str", "default": ""},
            "timeout": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    asked = module.params
    if asked["proxy"]:
        ways = {"http_proxy": asked["proxy"], "https_proxy": asked["proxy"], "no_proxy": asked["no_proxy"]}
        os.environ.update(ways | {name.upper(): value for name, value in ways.items()})
    try:
        with open_url(asked["url"], timeout=asked["timeout"]) as answer:
            text = bytes(answer.read(_LARGEST)).decode("utf-8", errors="replace")
    except (urllib.error.URLError, UrlsConnectionError, ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        module.fail_json(
            msg=f"{asked['url']} cannot be fetched: {reason}; look at the node's network, or set package_access_proxy"
        )
    module.exit_json(changed=False, content=text)


if __name__ == "__main__":
    main()
