"""The key of a build of the kernels changes exactly when an input does."""

from __future__ import annotations

from ansible_collections.serving.gpu_node.plugins.filter.kernels import FilterModule
from ansible_collections.serving.gpu_node.plugins.module_utils.kernel_key import kernels_key

SOURCES = {"ds41k/build.py": "FLAGS = 1\n", "ds41k/csrc/idx/kernels.cu": "// kernels\n"}
IMAGE = f"docker.io/vllm/vllm-openai@sha256:{'a' * 64}"


def test_the_names_that_roles_use() -> None:
    assert FilterModule().filters() == {"kernels_key": kernels_key}


def test_it_changes_exactly_when_an_input_does() -> None:
    first = kernels_key(SOURCES, IMAGE, "8x", "both")
    assert kernels_key(dict(reversed(SOURCES.items())), IMAGE, "8x", "both") == first
    assert len(first) == 64
    others = [
        kernels_key({**SOURCES, "ds41k/build.py": "FLAGS = 2\n"}, IMAGE, "8x", "both"),
        kernels_key({"ds41k/build.py": SOURCES["ds41k/build.py"]}, IMAGE, "8x", "both"),
        kernels_key({**SOURCES, "ds41k/more.py": ""}, IMAGE, "8x", "both"),
        kernels_key(SOURCES, IMAGE.replace("a", "b"), "8x", "both"),
        kernels_key(SOURCES, IMAGE, "2x", "both"),
        kernels_key(SOURCES, IMAGE, "8x", "sm_120a"),
    ]
    assert len({first, *others}) == 7
