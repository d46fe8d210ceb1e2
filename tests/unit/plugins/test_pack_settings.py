"""A pack's settings file: read without a shell, and compared with the plan by the recipe's names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.pack_settings import (
    compare_environment,
    describe_comparison,
    parse_environment,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.samples import resolved

FILE = """\
# settings of the 8x profile
PROFILE=8x
export SPEC_K=7            # tuned for code
MAX_MODEL_LEN="1048576"
MAX_NUM_SEQS=${MAX_NUM_SEQS:-128}
: "${MAX_BATCHED:=16384}"
KV_MEM=${KV_MEM-'18G'}
BOTH=$KV_MEM/${PROFILE}
NESTED=${A:-${B:-"two words"}}
export ONE=1 TWO='a # b'
ESCAPED="a \\"b\\" \\$c"
LONG=first\\
second
EMPTY=
"""


def test_assignments_are_read_as_a_shell_reads_them(tmp_path: Path) -> None:
    found = parse_environment(FILE)
    assert found.unread == []
    assert found.values["NESTED"] == "two words"
    assert found.values["LONG"] == "firstsecond"
    names = list(found.values)
    (tmp_path / "env").write_text(FILE)
    script = f". {tmp_path}/env; for name in {' '.join(names)}; do printf '%s\\n' \"${{!name}}\"; done"
    said = subprocess.run(["env", "-i", "/bin/bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert dict(zip(names, said.splitlines(), strict=True)) == found.values


@pytest.mark.parametrize(
    "line",
    [
        "A=$(hostname)",
        "A=`hostname`",
        "A=$HOME/x",
        "A=${HOME}",
        "A=${B%x}",
        "A=${D:-$(date)}",
        "A='open",
        'A="open',
        "A=${open",
        "A=1; rm -rf /",
        "A=1 && B=2",
        "A=(1 2)",
        "A=1 > /x",
        "source other.env",
        "A+=1",
        "exit 1",
    ],
)
def test_what_only_a_shell_could_tell_is_listed_and_sets_nothing(line: str) -> None:
    found = parse_environment(f"B=1\n{line}\nC=2\n")
    assert found.values == {"B": "1", "C": "2"}
    assert found.unread == [f"2: {line}"]


def test_what_happens_only_sometimes_sets_nothing() -> None:
    found = parse_environment('if [ "$R" = 1 ]; then\n  A=1\nfi\nsetup() {\n  B=2\n}\nC=3\n')
    assert found.values == {"C": "3"}
    assert [line.partition(":")[0] for line in found.unread] == ["1", "2", "3", "4", "5", "6"]


@given(st.text())
def test_any_text_is_read_or_listed(text: str) -> None:
    found = parse_environment(text)
    assert all(isinstance(value, str) for value in found.values.values())


def compare(text: str) -> dict[str, object]:
    plan = resolved(name="8x")
    return compare_environment(parse_environment(text).values, plan["replicas"][0]["env"], plan["settings"])


@pytest.mark.parametrize(
    "line",
    [
        "KV_MEM=18G",
        "KV_MEM=19327352832",
        "KV_MEM=18GiB",
        "KV_MEM=18432M",
        "CONTAINER_MEM=400g",
        "CONTAINER_MEM=400G",
        "CONTAINER_MEM=400GiB",
        "CONTAINER_MEM=429496729600",
        "DS41_IDX_CHUNK=true",
        "SPEC_K=07",
        "PROFILE=8x",
    ],
)
def test_another_spelling_of_the_same_value_does_not_differ(line: str) -> None:
    assert compare(line)["different"] == []


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        # decimal to vLLM
        ("KV_MEM=18g", "18G"),
        ("CONTAINER_MEM=400000000000", "400g"),
        ("SPEC_K=3", "7"),
        ("SPEC_K=", "7"),
        ("DS41_IDX_CHUNK=0", "1"),
        ("DS41_DRAFTER=released", "code"),
        ("MAX_MODEL_LEN=1M", "1048576"),
    ],
)
def test_another_value_differs(line: str, ours: str) -> None:
    name, _, value = line.partition("=")
    assert compare(line)["different"] == [{"name": name, "pack": value, "ours": ours}]


def test_what_only_one_side_has_is_told_apart() -> None:
    compared = compare("XMOE_LIB=/opt/pack/recipe/kernels/x.so\nHF_HUB_OFFLINE=1\nSPEC_K=7\n")
    assert compared["only_pack"] == {"XMOE_LIB": "/opt/pack/recipe/kernels/x.so"}
    assert compared["different"] == []
    only_ours = compared["only_ours"]
    assert isinstance(only_ours, list)
    assert {"PROFILE", "KV_MEM", "XMOE_FLAT_MAX_BSZ"} <= set(only_ours)
    # what every replica gets is no setting of a recipe
    assert "SPEC_K" not in only_ours and "HOME" not in only_ours


def test_the_comparison_is_said() -> None:
    found = parse_environment("SPEC_K=3\nKV_MEM=\nX=1\nA=$(b)\n")
    plan = resolved(name="8x")
    compared = compare_environment(found.values, plan["replicas"][0]["env"], plan["settings"])
    lines = describe_comparison(compared, found.unread, "serve/profile-8x.env")
    assert "  differs: SPEC_K  pack 3, ours 7" in lines
    assert "  differs: KV_MEM  pack (empty), ours 18G" in lines
    assert "  only in the pack: X=1" in lines
    assert "  not understood, line 4: A=$(b)" in lines
    assert any(line.startswith("  only in the plan: PROFILE, MAX_MODEL_LEN, ") for line in lines)
    same = describe_comparison(compare("SPEC_K=7"), [], "f")
    assert "  no setting that both have differs" in same
