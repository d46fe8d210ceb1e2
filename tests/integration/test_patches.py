"""The patches on the sources that they are for: vLLM 0.33.0's own, out of its wheel.

vLLM cannot be imported here, which needs CUDA's libraries. The functions that decide the geometry are taken out of the
sources by their syntax tree and run with stand-ins for the platform and for a tensor, which here is a shape, strides
and addresses. What this cannot show: that the kernels decode with it on sm_120. That is for a GPU to say.
"""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ansible.plugins.loader import init_plugin_loader

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "roles" / "serving_image" / "files" / "patches"

# Ansible's own import hook: the package of that name in site-packages would hide the checkout.
init_plugin_loader([str(ROOT / "collections")])

from ansible_collections.serving.gpu_node.plugins.module_utils.patch_series import (  # noqa: E402
    APPLIES,
    missing_patches,
    try_series,
)
from gpu_node_image.trees import folder_reader, version_of  # noqa: E402

ATTENTION = "vllm/models/deepseek_v41/attention.py"
FLASHINFER = "vllm/models/deepseek_v41/nvidia/flashinfer_sparse.py"
BACKEND = "vllm/v1/attention/backend.py"
INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
WORKER = "vllm/v1/worker/utils.py"
DEEP_GEMM = "vllm/utils/deep_gemm.py"
SM_120 = (120, 121)
OTHERS = (80, 90, 100, 103)
# 128 bytes of fp8 and a scale of 4.
STATE_BYTES = 132


def series() -> list[tuple[str, str]]:
    entries = yaml.safe_load((PATCHES / "series.yml").read_text())
    names = [entry["file"] for entry in entries if entry["package"] == "vllm"]
    return [(name, (PATCHES / name).read_text()) for name in names]


class Sources:
    """The wheel's sources, as they are or patched."""

    def __init__(self, read: Callable[[str], str | None], changed: dict[str, str]) -> None:
        self.read, self.changed = read, changed

    def text(self, path: str) -> str:
        found = self.changed.get(path) or self.read(path)
        assert found is not None, path
        return found

    def take(self, path: str, names: Mapping[str, tuple[str, ...]], known: dict[str, Any]) -> dict[str, Any]:
        """Run some functions, and some methods of some classes; `names` maps each to its methods."""
        body: list[ast.stmt] = []
        for node in ast.parse(self.text(path)).body:
            name = (
                node.targets[0].id
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
                else getattr(node, "name", "")
            )
            if name not in names:
                continue
            if isinstance(node, ast.ClassDef):
                methods = [part for part in node.body if getattr(part, "name", "") in names[name]]
                assert len(methods) == len(names[name]), f"{name} of {path} lacks some of {names[name]}"
                node = ast.ClassDef(
                    name, known.get(f"bases of {name}", []), [], methods or [ast.Pass()], [], **TYPE_PARAMS
                )
            body.append(node)
        assert len(body) == len(names), f"{path} lacks some of {sorted(names)}"
        module = ast.fix_missing_locations(ast.Module([FUTURE, *body], []))
        space = dict(known)
        exec(compile(module, path, "exec", dont_inherit=True), space)
        return space


FUTURE = ast.parse("from __future__ import annotations").body[0]
TYPE_PARAMS: Any = {"type_params": []} if sys.version_info >= (3, 12) else {}


def bases(name: str) -> list[ast.expr]:
    return [ast.Name(name, ast.Load())]


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel's sources, fetched once; what is said on the way is for the person who waits."""
    argv = [sys.executable, str(ROOT / "tests" / "engine" / "fetch_vllm.py")]
    return Path(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, timeout=1800).stdout.strip())


@pytest.fixture(scope="module")
def stock(wheel: Path) -> Sources:
    return Sources(folder_reader(wheel), {})


@pytest.fixture(scope="module")
def patched(stock: Sources) -> Sources:
    results, changed = try_series(series(), stock.read)
    assert [result.state for result in results] == [APPLIES], results
    assert missing_patches(series(), lambda path: changed.get(path) or stock.read(path)) == []
    return Sources(stock.read, changed)


@dataclass(frozen=True)
class MultipleOf:
    base: int


def platform(capability: int) -> SimpleNamespace:
    """As vllm.platforms: a family is what the capabilities of one architecture share."""
    return SimpleNamespace(is_device_capability_family=lambda family: capability // 10 == family // 10)


@dataclass(frozen=True)
class Spec:
    """What the functions read of a cache's specification."""

    block_size: int
    tokens_per_state: int | Fraction

    def get_num_kernel_states(self, kernel_block_size: int) -> int:
        return int(kernel_block_size // self.tokens_per_state)


class Geometry:
    """Every decision about pages, for one architecture."""

    def __init__(self, sources: Sources, capability: int) -> None:
        self.is_patched = bool(sources.changed)
        known: dict[str, Any] = {"current_platform": platform(capability), "MultipleOf": MultipleOf, "math": math}
        known |= sources.take(DEEP_GEMM, {"get_paged_mqa_page_sizes": ()}, known)
        sizes = ("get_supported_kernel_block_sizes",)
        more = ("writes_by_kernel_block",) if self.is_patched else ()
        known |= sources.take(BACKEND, {"AttentionBackend": ("supports_block_size", *more)}, known)
        known["bases of DeepseekV41IndexerBackend"] = bases("AttentionBackend")
        known["bases of DeepseekV4FlashInferMLASparseBackend"] = bases("AttentionBackend")
        extra = {"_MAX_V41_COMPRESS_RATIO": ()} if self.is_patched else {}
        known |= sources.take(INDEXER, {"DeepseekV41IndexerBackend": (*sizes, *more, "get_name"), **extra}, known)
        known |= sources.take(FLASHINFER, {"DeepseekV4FlashInferMLASparseBackend": sizes}, known)
        self.indexer = known["DeepseekV41IndexerBackend"]
        self.attention = known["DeepseekV4FlashInferMLASparseBackend"]
        names: dict[str, tuple[str, ...]] = {"_block_size_is_supported": (), "select_common_block_size": ()}
        names["AttentionGroup"] = ("map_kv_cache_to_kernel_blocks",)
        self.worker = sources.take(WORKER, names, known)
        self.known = known

    def kernel_block(self, backend: Any, spec: Spec) -> int:
        return int(self.worker["select_common_block_size"](spec.block_size, [backend], [spec]))

    def sizes(self) -> list[Any]:
        specs = [None, Spec(256, 1), Spec(256, 2)]
        return [
            backend.get_supported_kernel_block_sizes(spec)
            for backend in (self.indexer, self.attention)
            for spec in specs
        ]


def test_the_series_is_for_these_sources(wheel: Path, stock: Sources) -> None:
    entries = yaml.safe_load((PATCHES / "series.yml").read_text())
    versions = {entry["version"] for entry in entries if entry["package"] == "vllm"}
    assert versions == {version_of(wheel, "vllm", "the wheel")}
    assert missing_patches(series(), stock.read) == [name for name, _ in series()]


def test_what_the_patches_change_is_python(patched: Sources) -> None:
    assert sorted(patched.changed) == sorted([ATTENTION, FLASHINFER, BACKEND, INDEXER, WORKER])
    for path, text in patched.changed.items():
        compile(text, path, "exec", dont_inherit=True)


@pytest.mark.parametrize("capability", OTHERS)
def test_other_architectures_keep_their_pages(stock: Sources, patched: Sources, capability: int) -> None:
    before, after = Geometry(stock, capability), Geometry(patched, capability)
    assert after.sizes() == before.sizes()
    assert not after.indexer.writes_by_kernel_block()
    assert swa_page(patched, capability) == 32 == stock_swa_page(stock)
    assert stride(patched, capability, 576) is None


@pytest.mark.parametrize("capability", SM_120)
def test_sm_120_gets_pages_that_its_kernels_take(patched: Sources, capability: int) -> None:
    geometry = Geometry(patched, capability)
    for manager, ratio in product((128, 256), (1, 2)):
        spec = Spec(manager, ratio)
        block = geometry.kernel_block(geometry.indexer, spec)
        assert spec.get_num_kernel_states(block) == 64, (manager, ratio)
        # Attention keeps whole blocks: those of a ratio-1 layer could not be split.
        assert geometry.kernel_block(geometry.attention, spec) == manager
    for backend in (geometry.indexer, geometry.attention):
        assert backend.supports_block_size(256) and backend.supports_block_size(128)
    # One block of the manager must hold whole pages of both kinds of layers.
    assert not geometry.indexer.supports_block_size(64)
    assert swa_page(patched, capability) == 64


@pytest.mark.parametrize("capability", SM_120)
def test_stock_hands_sm_120_what_it_does_not_take(stock: Sources, capability: int) -> None:
    geometry = Geometry(stock, capability)
    spec = Spec(256, 1)
    assert spec.get_num_kernel_states(geometry.kernel_block(geometry.indexer, spec)) == 128
    with pytest.raises(ValueError, match="cannot be split into"):
        layer(geometry, spec, block_stride=64 * STATE_BYTES * 100)


def calls(text: str, name: str) -> list[ast.Call]:
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [node for node in found if isinstance(node.func, ast.Name) and node.func.id == name]


def swa_argument(sources: Sources) -> ast.expr:
    (call,) = calls(sources.text(ATTENTION), "DeepseekV4SWACache")
    (value,) = [word.value for word in call.keywords if word.arg == "block_size"]
    return value


def stock_swa_page(stock: Sources) -> int:
    return int(ast.literal_eval(swa_argument(stock)))


def swa_page(patched: Sources, capability: int) -> int:
    """What the argument of the layer's own sliding-window cache comes to."""
    space = patched.take(ATTENTION, {"_swa_page_tokens": ()}, {"current_platform": platform(capability)})
    return int(eval(compile(ast.Expression(swa_argument(patched)), ATTENTION, "eval"), space))


def stride(patched: Sources, capability: int, alignment: int) -> int | None:
    known: dict[str, Any] = {"current_platform": platform(capability), "math": math}
    known |= patched.take(DEEP_GEMM, {"get_paged_mqa_page_sizes": ()}, known)
    space = patched.take(ATTENTION, {"DeepseekV4IndexerCache": ("_kernel_page_stride",)}, known)
    cache = space["DeepseekV4IndexerCache"]()
    cache.head_dim, cache.dtype = STATE_BYTES, SimpleNamespace(itemsize=1)
    found = cache._kernel_page_stride(alignment)
    return None if found is None else int(found)


@dataclass(frozen=True)
class View:
    """A tensor without its bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def stride(self, axis: int | None = None) -> Any:
        return self.strides if axis is None else self.strides[axis]

    def as_strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> View:
        return replace(self, shape=shape, strides=strides)


BLOCKS = 7


def layer(geometry: Geometry, spec: Spec, block_stride: int) -> tuple[View, int]:
    """The cache of one layer as its kernels see it, and the pages between the first pages of two blocks."""
    group = geometry.worker["AttentionGroup"]()
    group.backend, group.kv_cache_spec, group.kernel_block_stride = geometry.indexer, spec, 0
    group.kernel_block_size = geometry.kernel_block(geometry.indexer, spec)
    rows = spec.get_num_kernel_states(spec.block_size)
    manager = View((BLOCKS, 1, rows, STATE_BYTES), (block_stride, rows * STATE_BYTES, STATE_BYTES, 1))
    view = group.map_kv_cache_to_kernel_blocks(manager)
    return view, int(group.kernel_block_stride)


@pytest.mark.parametrize("ratio", [1, 2])
def test_pages_of_sm_120_lie_inside_their_layers_part_of_a_block(patched: Sources, ratio: int) -> None:
    geometry, spec = Geometry(patched, 120), Spec(256, ratio)
    alignment = stride(patched, 120, 576)
    assert alignment is not None and alignment % 576 == 0 and alignment % (64 * STATE_BYTES) == 0
    # The pages of 40 layers and what rounds their sum up, as the planner does it.
    states = spec.get_num_kernel_states(256)
    block_stride = math.ceil(40 * states * STATE_BYTES / alignment) * alignment
    view, apart = layer(geometry, spec, block_stride)
    assert view.shape[-2:] == (64, STATE_BYTES)
    per_block = states // 64
    seen = set()
    for block, state in product(range(BLOCKS), range(states)):
        # As the kernel that makes slots does it, with the block table that the group maps.
        page = block * apart + state // 64
        slot = page * 64 + state % 64
        assert page < view.shape[0]
        address = slot // 64 * view.strides[0] + slot % 64 * view.strides[-2]
        # The first states * STATE_BYTES of a block are this layer's; the next layer's begin there.
        assert block * block_stride <= address < block * block_stride + states * STATE_BYTES
        seen.add(address)
    assert len(seen) == BLOCKS * states
    assert per_block == (4 if ratio == 1 else 2)


@pytest.mark.parametrize("ratio", [1, 2])
def test_slots_come_from_the_block_table_where_blocks_are_split(patched: Sources, ratio: int) -> None:
    for capability in (*OTHERS, *SM_120):
        known: dict[str, Any] = {"current_platform": platform(capability)}
        known["bases of DeepseekV41IndexerMetadataBuilder"] = bases("DeepseekV32IndexerMetadataBuilder")
        names = {"DeepseekV32IndexerMetadataBuilder": ("slots_from_block_table",)}
        names |= {"DeepseekV41IndexerMetadataBuilder": ("slots_from_block_table",)}
        space = patched.take(INDEXER, names, known)
        old, new = space["DeepseekV32IndexerMetadataBuilder"](), space["DeepseekV41IndexerMetadataBuilder"]()
        old.compress_ratio = new.compress_ratio = ratio
        assert old.slots_from_block_table is (ratio > 1)
        assert new.slots_from_block_table is (ratio > 1 or capability in SM_120)


def test_the_builder_of_the_indexer_is_the_patched_one(patched: Sources) -> None:
    text = patched.text(INDEXER)
    space = patched.take(
        INDEXER, {"DeepseekV41IndexerBackend": ("get_builder_cls",)}, {"DeepseekV41IndexerMetadataBuilder": 1}
    )
    assert space["DeepseekV41IndexerBackend"].get_builder_cls() == 1
    # The three places that make, fill and refresh the slots ask the same.
    assert text.count("if self.slots_from_block_table:") == 3
