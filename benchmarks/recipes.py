"""Train recipes from their defaults, one after another, and print what each reached and cost as a Markdown table.

    python benchmarks/recipes.py cifar_moe cifar_dense
    python benchmarks/recipes.py gpt_moe gpt_dense -- data.path=tinyshakespeare.txt

Words after `--` are overrides for every run.  Times are wall-clock times of the whole command, from start to exit, so
nothing else should be running.  FLOPs are those of a forward pass of one sample (or token), multiply-adds as two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from moeflow.config import load
from moeflow.models import build_model
from moeflow.models.flops import count_parameters, forward_flops
from moeflow.schema import RunConfig


def run(recipe: str, overrides: list[str], folder: Path) -> float:
    """Train one recipe in `folder`; returns the seconds it took."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "moeflow", "train", f"+recipe={recipe}", f"run.dir={folder}", *overrides]
    subprocess.run(command, check=True)
    return time.perf_counter() - started


def cost(config: RunConfig) -> tuple[int, int, float]:
    """(parameters, active parameters, forward FLOPs of one sample or token)."""
    with torch.device("meta"):
        model = build_model(config.model, config.gate)
    if config.data.name == "text":
        inputs = torch.zeros(1, config.data.seq_len, dtype=torch.int64)
        units = config.data.seq_len
    else:
        inputs, units = torch.zeros(1, 3, 32, 32), 1
    return *count_parameters(model), forward_flops(model, inputs) / units


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    recipes, overrides = parser.parse_args(words[:split]).recipes, words[split + 1 :]
    rows = []
    with tempfile.TemporaryDirectory() as parent:
        for recipe in recipes:
            folder = Path(parent) / recipe
            seconds = run(recipe, overrides, folder)
            summary = json.loads((folder / "summary.json").read_text())
            config = load(folder / "config.yaml")
            if getattr(config.model, "vocab_size", 0) is None:
                from moeflow import data

                config.model.vocab_size = data.build(config.data, config.run.seed).vocab_size
            total, active, flops = cost(config)
            figures = ", ".join(
                f"{k.removeprefix('eval/')} {v:.4f}" for k, v in summary.items() if k.startswith("eval/")
            )
            rows.append(
                (
                    recipe,
                    summary["data"],
                    figures,
                    f"{seconds:.0f} s",
                    f"{total:,}",
                    f"{active:,}",
                    f"{flops / 1e6:.2f}",
                )
            )
    machine = platform.processor() or platform.machine()
    print(f"\n{time.strftime('%Y-%m-%d')}, {machine}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    print("| recipe | data | result | time | parameters | active | forward MFLOPs |\n|---|---|---|---:|---:|---:|---:|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
