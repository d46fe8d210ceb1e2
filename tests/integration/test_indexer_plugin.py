"""What the chunked indexer builds upon, read in the sources of the vLLM that the GPU profiles run.

The plugin refuses any other version, so these sources are the ones that count. They are read, not run: there is no
build of this version for CPUs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from testhost import ROOT

KERNELS = ROOT / "roles" / "kernels" / "files" / "ds41k"
FETCH = ROOT / "tests" / "engine" / "fetch_vllm.py"
UPSTREAM = "vllm/model_executor/layers/sparse_attn_indexer.py"


@pytest.fixture(scope="module")
def sources() -> Path:
    done = subprocess.run([sys.executable, str(FETCH)], capture_output=True, text=True, timeout=2000, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def find(tree: ast.AST, name: str) -> ast.AST:
    """The class or function of that name."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name]
    assert len(found) == 1, f"{len(found)} definitions of {name}"
    return found[0]


def names_of(tree: ast.Module) -> set[str]:
    """What a module has at its top: definitions, imports, assignments."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def operator_call(tree: ast.AST, cls: str) -> ast.Call:
    """The call that `forward_cuda` of the class returns."""
    returned = [node for node in ast.walk(find(find(tree, cls), "forward_cuda")) if isinstance(node, ast.Return)]
    assert len(returned) == 1 and isinstance(returned[0].value, ast.Call)
    return returned[0].value


def test_the_plugin_is_for_the_version_that_is_fetched() -> None:
    version = next(
        ast.literal_eval(node.value)
        for node in parse(FETCH).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VERSION"
    )
    known = next(
        ast.literal_eval(node.value)
        for node in parse(KERNELS / "plugin.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KNOWN_VLLM"
    )
    assert known == (version,)


def test_every_name_that_the_plugin_takes_from_vllm_is_there(sources: Path) -> None:
    ours = parse(KERNELS / "indexer.py")
    there = names_of(parse(sources / UPSTREAM))
    used = {
        node.attr
        for node in ast.walk(ours)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "upstream"
    }
    assert {"SparseAttnIndexer", "fp8_fp4_paged_mqa_logits", "get_indexer_topk"} <= used
    assert used <= there, f"vLLM's indexer module has no {used - there}"
    for node in ours.body:
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("vllm.")
            and node.names[0].asname is None
        ):
            file = sources / Path(*(node.module or "").split(".")).with_suffix(".py")
            missing = {alias.name for alias in node.names} - names_of(parse(file))
            assert not missing, f"{node.module} has no {missing}"


def test_the_operator_is_called_as_vllms_own_is(sources: Path) -> None:
    theirs = operator_call(parse(sources / UPSTREAM), "SparseAttnIndexer")
    ours = operator_call(parse(KERNELS / "indexer.py"), "ChunkedSparseAttnIndexer")
    assert ast.unparse(theirs.func) == "torch.ops.vllm.sparse_attn_indexer"

    def plain(call: ast.Call) -> list[str]:
        words = [ast.unparse(word) for word in call.args] + [ast.unparse(word) for word in call.keywords]
        return [{"q_values": "values", "q_scale": "scale"}.get(word, word) for word in words]

    assert plain(ours) == plain(theirs)


def test_the_decorator_leaves_the_function_that_the_plugin_calls(sources: Path) -> None:
    function = find(parse(sources / UPSTREAM), "sparse_attn_indexer")
    assert isinstance(function, ast.FunctionDef)
    assert [ast.unparse(word) for word in function.decorator_list] == ["eager_break_during_capture"]
    wrapper = find(parse(sources / "vllm/compilation/breakable_cudagraph.py"), "eager_break_during_capture")
    assert "@functools.wraps(fn)" in ast.unparse(wrapper)


def test_the_model_makes_its_indexer_by_the_class_that_is_replaced(sources: Path) -> None:
    indexers = [
        node
        for node in ast.walk(parse(sources / "vllm/models/deepseek_v41/attention.py"))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "attn_cls"
    ]
    assert [ast.unparse(node.value) for node in indexers if node.value is not None] == ["SparseAttnIndexer"]
    make = ast.unparse(find(find(parse(sources / "vllm/model_executor/custom_op.py"), "CustomOp"), "__new__"))
    assert "op_registry_oot[op_name]" in make and "op_name = cls.__name__" in make


def test_graphs_are_split_at_vllms_operator_so_they_must_be_at_ours(sources: Path) -> None:
    config = find(parse(sources / "vllm/config/compilation.py"), "CompilationConfig")
    lists = [
        ast.literal_eval(node.value)
        for node in ast.walk(config)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_attention_ops" and node.value is not None
    ]
    assert len(lists) == 1 and "vllm::sparse_attn_indexer" in lists[0]


def test_the_metadata_has_the_fields_that_are_read(sources: Path) -> None:
    tree = parse(sources / "vllm/v1/attention/backends/mla/indexer.py")

    def fields(cls: str) -> set[str]:
        return {ast.unparse(node.target) for node in ast.walk(find(tree, cls)) if isinstance(node, ast.AnnAssign)}

    ours = ast.unparse(parse(KERNELS / "indexer.py"))
    for holder, cls in (("decode", "DeepSeekV32IndexerDecodeMetadata"), ("metadata", "DeepseekV32IndexerMetadata")):
        read = {
            node.attr
            for node in ast.walk(ast.parse(ours))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == holder
        }
        assert read and read <= fields(cls), f"{cls} has no {read - fields(cls)}"
    assert "num_decodes" in fields("DeepseekV32IndexerMetadata")
