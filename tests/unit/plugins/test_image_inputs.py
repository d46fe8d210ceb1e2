"""References are full and pinned, the key changes exactly with the inputs, and the bill names what is installed."""

from __future__ import annotations

import json

import pytest
from ansible_collections.serving.gpu_node.plugins.filter.serving_image import image_auths
from ansible_collections.serving.gpu_node.plugins.module_utils.image_inputs import (
    ImageReferenceError,
    build_jobs,
    image_key,
    image_labels,
    input_problems,
    parse_reference,
    pinned,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.sbom import (
    cyclonedx,
    dpkg_components,
    nccl_problem,
    python_components,
)

DIGEST = "sha256:" + "a" * 64
GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("docker.io/vllm/vllm-openai:v0.33.0", ("docker.io/vllm/vllm-openai", "v0.33.0", "")),
        (f"docker.io/vllm/vllm-openai@{DIGEST}", ("docker.io/vllm/vllm-openai", "", DIGEST)),
        (f"localhost:5000/a_b/c--d:1@{DIGEST}", ("localhost:5000/a_b/c--d", "1", DIGEST)),
        ("registry:5000/x", ("registry:5000/x", "", "")),
    ],
)
def test_a_reference_has_its_parts(text: str, parts: tuple[str, str, str]) -> None:
    assert tuple(parse_reference(text).values()) == parts


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("vllm/vllm-openai:v1", "begin it with its registry"),
        ("vllm", "begin it with its registry"),
        ("", "begin it with its registry"),
        ("docker.io/x@sha256:12", "64 hex digits"),
        ("docker.io/x:-bad", "is no tag"),
        ("docker.io/Upper", "is no name of an image"),
        ("docker.io/x y", "is no name of an image"),
    ],
)
def test_what_is_no_full_reference_is_refused(text: str, error: str) -> None:
    with pytest.raises(ImageReferenceError, match=error):
        parse_reference(text)


def test_a_packs_recipe_needs_no_base_and_takes_no_wheel_of_ours() -> None:
    def problems(prebuilt: str = "", wheel: str = "", archive: str = "") -> list[str]:
        return input_problems("cuda", "a tag", prebuilt, archive, wheel, False, recipe="pack")

    assert problems() == problems(archive="/srv/a.tar") == []
    (problem,) = problems(wheel="/srv/w.whl")
    assert problem.startswith("serving_image_plugin_wheel: /srv/w.whl is not put into a pack's image")
    (problem,) = problems(prebuilt=f"r.io/x@{DIGEST}")
    assert problem.startswith("serving_image_prebuilt and serving_image_recipe: pack are both set")


def test_a_pinned_reference_has_no_tag() -> None:
    assert pinned(parse_reference(f"r.io/x:1@{DIGEST}")) == f"r.io/x@{DIGEST}"
    assert pinned(parse_reference("r.io/x:1"), DIGEST) == f"r.io/x@{DIGEST}"


def problems(
    base: str = f"r.io/x@{DIGEST}",
    prebuilt: str = "",
    archive: str = "",
    wheel: str = "",
    tag: bool = False,
    registry: str = "",
) -> str:
    return "; ".join(input_problems("cuda", base, prebuilt, archive, wheel, tag, registry))


def test_good_inputs_have_no_problems() -> None:
    assert problems() == ""
    assert problems(archive="/a.tar", wheel="/w/ds41k-1-cp312-abi3-linux_x86_64.whl") == ""
    assert problems(base="r.io/x:1", tag=True) == ""
    assert problems(registry="r.io:5000/gpu-node") == ""
    # A tag of the profile does not matter when nothing is built on it, and the CPU image has no base at all.
    assert problems(base="r.io/x:1", prebuilt=f"r.io/y@{DIGEST}") == ""
    assert input_problems("cpu", "", "", "", "", False) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"base": "r.io/x:v1"},
            ("serving_image_base: r.io/x:v1 has the tag v1 and no digest", "serving_image_allow_tag"),
        ),
        ({"base": "r.io/x", "tag": True}, ("has no tag and no digest",)),
        ({"base": "x"}, ("begin it with its registry",)),
        # A tag is no choice here: what runs would change without a build.
        ({"prebuilt": "r.io/y:1", "tag": True}, ("serving_image_prebuilt: r.io/y:1 has the tag 1",)),
        ({"prebuilt": f"r.io/y@{DIGEST}", "archive": "/a.tar"}, ("are both set",)),
        ({"wheel": "ds41k.whl"}, ("ds41k.whl is no path of a wheel",)),
        ({"registry": "r.io"}, ("serving_image_registry: r.io: begin it with its registry",)),
        ({"registry": "r.io/a/b:1"}, ("r.io/a/b:1 names one image", "folder alone, r.io/a/b")),
    ],
)
def test_each_input_that_cannot_be_used_is_said(given: dict[str, str], said: tuple[str, ...]) -> None:
    text = problems(**given)  # type: ignore[arg-type]
    assert all(part in text for part in said), text


INPUTS = {"base": f"r.io/x@{DIGEST}", "patches": ["1=aa", "2=bb"], "containerfile": "cc", "wheel": ""}


@pytest.mark.parametrize(
    "change",
    [
        {"base": "r.io/x@sha256:" + "b" * 64},
        {"patches": ["2=bb", "1=aa"]},
        {"patches": ["1=aa"]},
        {"patches": ["1=aa", "2=bc"]},
        {"containerfile": "cd"},
        {"wheel": "w=dd"},
    ],
)
def test_the_key_changes_with_every_input_and_with_nothing_else(change: dict[str, object]) -> None:
    assert image_key({**INPUTS, **change}) != image_key(INPUTS)
    assert image_key(dict(reversed(INPUTS.items()))) == image_key(INPUTS)


def test_labels_tell_every_input() -> None:
    labels = image_labels("kk", INPUTS)
    assert labels == {
        "io.github.gpu-node.image.key": "kk",
        "io.github.gpu-node.image.base": INPUTS["base"],
        "io.github.gpu-node.image.patches": "1=aa 2=bb",
        "io.github.gpu-node.image.containerfile": "cc",
        "io.github.gpu-node.image.wheel": "none",
        "org.opencontainers.image.base.name": "r.io/x",
        "org.opencontainers.image.base.digest": DIGEST,
    }


@pytest.mark.parametrize(("gib", "cpus", "jobs"), [(0, 8, 1), (3, 8, 1), (4, 8, 2), (100, 8, 8), (100, 1, 1)])
def test_as_many_workers_as_memory_carries(gib: int, cpus: int, jobs: int) -> None:
    assert build_jobs(gib * GIB, cpus) == jobs


def test_credentials_are_what_podman_reads() -> None:
    text = image_auths([{"registry": "r.io:5000", "username": "u", "password": "p:w"}])
    assert json.loads(text) == {"auths": {"r.io:5000": {"auth": "dTpwOnc="}}}


STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u10
Description: library
 Version: 9 is a line of the description

Package: gone
Status: deinstall ok config-files
Version: 1

Package: tzdata
Status: hold ok installed
Version: 1:2025b-0
"""


def test_the_bill_names_what_is_installed_and_nothing_else() -> None:
    debian = dpkg_components(STATUS, "debian")
    assert [(one["name"], one["version"]) for one in debian] == [("libc6", "2.36-9+deb12u10"), ("tzdata", "1:2025b-0")]
    assert debian[0]["purl"] == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64"
    python = python_components(
        [
            "Name: vLLM_x\nVersion: 0.33.0\n\nName: no\nVersion: 1\n",
            "Name: vLLM_x\nVersion: 0.33.0\n",
            "Summary: none\n",
        ]
    )
    assert [(one["name"], one["purl"]) for one in python] == [("vLLM_x", "pkg:pypi/vllm-x@0.33.0")]
    bill = cyclonedx("localhost/x:1", "f" * 64, debian + python, {"key": "kk"})
    assert bill == cyclonedx("localhost/x:1", "f" * 64, debian + python, {"key": "kk"})
    assert bill["serialNumber"] != cyclonedx("localhost/x:1", "e" * 64, [], {})["serialNumber"]
    assert (bill["bomFormat"], bill["specVersion"], len(bill["components"])) == ("CycloneDX", "1.5", 3)
    assert bill["metadata"]["component"]["properties"] == [{"name": "key", "value": "kk"}]


@pytest.mark.parametrize(
    ("components", "named"),
    [
        ([("nvidia-nccl-cu12", "2.26.2")], "nvidia-nccl-cu12 2.26.2"),
        ([("nvidia-nccl-cu12", "2.25.1")], "nvidia-nccl-cu12 2.25.1"),
        ([("nvidia-nccl-cu13", "2.27.5")], ""),
        ([("nvidia-nccl-cu13", "2.31.2"), ("libnccl2", "2.26.2-1+cuda12.8")], ""),
        ([("libnccl2", "2.26.2-1+cuda12.8")], "libnccl2 2.26.2-1+cuda12.8"),
        ([("libnccl2", "unknown")], ""),
        ([("vllm", "0.33.0")], ""),
    ],
)
def test_an_image_with_a_bad_nccl_is_named(components: list[tuple[str, str]], named: str) -> None:
    # DRV-13
    bill = {"components": [{"name": name, "version": version} for name, version in components]}
    problem = nccl_problem(bill)
    assert problem.startswith(named)
    assert ("take a base with a newer one" in problem) == bool(named)


def test_an_image_without_a_bill_is_not_judged() -> None:
    assert nccl_problem({}) == ""
