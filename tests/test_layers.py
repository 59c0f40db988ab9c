"""The shape of the code: who may import whom, one door for each third-party world, sizes, and plain ASCII.

The rules are those of docs/architecture.md.  Imports are read from the syntax tree, so those inside functions and under
TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import functools
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import ROOT

PACKAGE = ROOT / "moeflow"
LEAVES = {"schema", "errors", "logging"}

# Part of the package -> parts it may import beside itself.
MAY_IMPORT = {
    "schema": {"errors"},
    "errors": set(),
    "logging": set(),
    "ops": LEAVES,
    "moe": LEAVES | {"ops"},
    "models": LEAVES | {"ops", "moe"},
    "plan": LEAVES,
    "parallel": LEAVES | {"ops", "moe", "models", "plan"},
    "data": LEAVES,
    "train": LEAVES | {"ops", "moe", "models", "plan", "parallel", "data"},
    "compat": LEAVES | {"ops", "moe", "models", "plan", "parallel"},
    "config": LEAVES | {"plan"},
    "report": LEAVES | {"models", "parallel", "train", "config"},
    "cli": LEAVES | {"ops", "moe", "models", "plan", "parallel", "train", "compat", "config", "report"},
    "__init__": {"moe", "models", "compat"},  # lazily, for the public names
    "__main__": {"cli"},
}

# Third-party world -> modules (or packages, with a trailing dot) that may import it.
DOORS = {
    "cupy": ["moeflow.ops._cupy"],
    "cupy_backends": ["moeflow.ops._cupy"],
    "cupyx": ["moeflow.ops._cupy"],
    "accelerate": ["moeflow.parallel.prepare", "moeflow.parallel.engines.", "moeflow.train."],
    "deepspeed": ["moeflow.parallel.engines.", "moeflow.train."],
    "hydra": ["moeflow.config.", "moeflow.cli."],
    "omegaconf": ["moeflow.config.", "moeflow.cli."],
    "wandb": ["moeflow.train.trackers"],
    "tensorboard": ["moeflow.train.trackers"],
    "torch.utils.tensorboard": ["moeflow.train.trackers"],
    "transformers": ["moeflow.compat."],
    "matplotlib": ["moeflow.report."],
}
# Names of torch.distributed that start no communication; the rest is for `parallel` alone.
PASSIVE = {
    "ProcessGroup", "Work", "checkpoint", "elastic", "get_rank", "get_world_size", "is_available", "is_initialized",
    "launcher", "run", "tensor",
}  # fmt: skip

# `moeflow doctor` tries every part and every third party by itself: that is what these trials are for.
FREE = {"moeflow.cli.doctor.trials"}

# Module above 400 lines -> why it is one piece.
LONG: dict[str, str] = {}


def module_name(path: Path) -> str:
    """Dotted name of a file of the package (`moeflow.ops` for its __init__)."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of all that is imported, `from a import b` giving `a.b`, and import_module("a") too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, "." * node.level + f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def layer_faults(name: str, tree: ast.Module) -> list[str]:
    part = name.split(".")[1]
    faults = []
    for line, target in imports(tree):
        package, _, rest = target.partition(".")
        to = rest.split(".")[0]
        if package == "":
            faults.append(f"{name}:{line} relative import {target}")
        elif package == "moeflow" and to != part and to in MAY_IMPORT and to not in MAY_IMPORT[part]:
            faults.append(f"{name}:{line} {part} must not import {to} ({target})")
    return faults


def door_faults(name: str, tree: ast.Module) -> list[str]:
    faults = []
    for line, target in imports(tree):
        for world, doors in DOORS.items():
            inside = target == world or target.startswith(f"{world}.")
            if inside and not any(name == door or (door[-1] == "." and f"{name}.".startswith(door)) for door in doors):
                faults.append(f"{name}:{line} {target} is for {', '.join(doors)} alone")
    return faults


def collective_faults(name: str, tree: ast.Module) -> list[str]:
    """Uses of torch.distributed outside `parallel` that may communicate."""
    used = []
    aliases = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname for alias in node.names if alias.name == "torch.distributed" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch" and node.level == 0:
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            used += [(node.lineno, alias.name) for alias in node.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases:
            used.append((node.lineno, node.attr))
    return [
        f"{name}:{line} torch.distributed.{what} is for parallel alone" for line, what in used if what not in PASSIVE
    ]


@pytest.mark.parametrize("part", sorted({name.split(".")[1] for name in FILES if "." in name}))
def test_imports_go_one_way(part):
    assert part in MAY_IMPORT, f"moeflow.{part} is new: give it a place in MAY_IMPORT and in docs/architecture.md"
    mine = [name for name in FILES if name.split(".")[1] == part and name not in FREE]
    assert [fault for name in mine for fault in layer_faults(name, tree_of(name))] == []


def test_each_third_party_has_one_door():
    assert [fault for name in FILES if name not in FREE for fault in door_faults(name, tree_of(name))] == []


def test_collectives_stay_in_parallel():
    outside = [name for name in FILES if name.split(".")[1] != "parallel" and name not in FREE]
    assert [fault for name in outside for fault in collective_faults(name, tree_of(name))] == []


@pytest.mark.parametrize(
    ("check", "name", "source", "fault"),
    [
        (
            layer_faults,
            "moeflow.ops.a",
            "def f():\n    from moeflow.moe.layer import MoELayer",
            "ops must not import moe",
        ),
        (layer_faults, "moeflow.plan.a", "import moeflow.parallel.topology", "plan must not import parallel"),
        (layer_faults, "moeflow.models.a", "from moeflow import train", "models must not import train"),
        (layer_faults, "moeflow.models.a", "from ..train import worker", "relative import"),
        (layer_faults, "moeflow.moe.a", "importlib.import_module('moeflow.data')", "moe must not import data"),
        (door_faults, "moeflow.moe.a", "import cupy.cuda", "moeflow.ops._cupy alone"),
        (door_faults, "moeflow.train.loop", "from torch.utils.tensorboard import SummaryWriter", "trackers alone"),
        (door_faults, "moeflow.train.a", "from omegaconf import OmegaConf", "moeflow.config."),
        (collective_faults, "moeflow.train.a", "import torch.distributed as d\nd.all_reduce(x)", "all_reduce"),
        (collective_faults, "moeflow.train.a", "from torch import distributed\ndistributed.barrier()", "barrier"),
        (collective_faults, "moeflow.train.a", "import torch\ntorch.distributed.send(x, 1)", "send"),
        (collective_faults, "moeflow.moe.a", "from torch.distributed import new_group", "new_group"),
    ],
)
def test_the_rules_catch_a_planted_fault(check, name, source, fault):
    found = check(name, ast.parse(source))
    assert len(found) == 1
    assert fault in found[0]


def test_modules_are_of_a_size_to_read():
    sizes = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()}
    assert {name: size for name, size in sizes.items() if size > 600} == {}
    assert {name: size for name, size in sizes.items() if size > 400 and name not in LONG} == {}
    assert statistics.median(sizes.values()) <= 200
    kernels = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "kernels").rglob("*.cu*")}
    assert {name: size for name, size in kernels.items() if size > 600} == {}


def test_functions_fit_a_screen():
    lengths = sorted(
        (node.end_lineno - node.lineno + 1, f"{name}:{node.lineno} {node.name}")
        for name in FILES
        for node in ast.walk(tree_of(name))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    assert lengths[int(0.9 * len(lengths))][0] <= 45
    assert [where for length, where in lengths if length > 100] == []


def test_sources_are_ascii():
    folders = ["moeflow", "kernels", "configs", "recipes", "tests", "benchmarks", ".ci"]
    kinds = {".py", ".yaml", ".cu", ".cuh", ".cpp", ".hpp", ".sh", ".toml"}
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    strange = [str(path.relative_to(ROOT)) for path in paths if not path.read_bytes().isascii()]
    assert strange == []


def test_data_folders_hold_no_code():
    for folder in ("configs", "recipes", "kernels"):
        code = [path for path in (ROOT / folder).rglob("*.py") if path.read_text().strip()]
        assert code == [], f"{folder}/ is installed as data; only an empty __init__.py marks it as a package"


@pytest.mark.parametrize("module", ["moeflow", "moeflow.schema", "moeflow.config", "moeflow.plan", "moeflow.cli.main"])
def test_torch_is_not_imported_at_start(module):
    heavy = "{'torch', 'accelerate', 'deepspeed', 'transformers', 'numpy', 'cupy'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


def test_public_names_are_lazy_and_complete():
    import moeflow

    assert moeflow.MoELayer.__module__.startswith("moeflow.moe")
    assert set(moeflow.__all__) <= set(dir(moeflow))
    with pytest.raises(AttributeError, match="no attribute 'MoeLayer'"):
        moeflow.MoeLayer  # noqa: B018
