"""Write constraints.txt: the versions that `make` installs, for every supported Python.

    make lock            # or: python .ci/lock.py PYTHON...

Each PYTHON (by default every pythonX.Y on the PATH that is supported) resolves `.[dev]` with pip's dry run in a new
environment, so nothing large is downloaded.  A package whose version differs between Pythons gets one line for each
range.  The CUDA libraries that torch pins for itself are left to torch.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
OWNED_BY_TORCH = re.compile(r"^(nvidia-(?!.*-cu12$)|triton$|cuda-toolkit$|cuda-bindings$)")
HEADER = """\
# Versions that `make` installs, one set that is known to work.  Written by `make lock`; do not edit by hand.
# The ranges that moeflow itself accepts stand in pyproject.toml.
"""


def resolve(python: str) -> tuple[str, dict[str, str]]:
    """Return (X.Y of `python`, {package: version}) as pip resolves `.[dev]` in an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        # An older pip downloads whole wheels in a dry run.
        subprocess.run([*pip, "install", "-q", "--upgrade", "pip"], check=True)
        report = Path(folder, "report.json")
        command = ["install", "-q", "--dry-run", "--ignore-installed", "--report", str(report), TORCH, f"{ROOT}[dev]"]
        subprocess.run([*pip, *command], check=True)
        parsed = json.loads(report.read_text())
    found = {"pip": parsed["pip_version"]}
    for item in parsed["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        if name != "moeflow" and not OWNED_BY_TORCH.match(name):
            found[name] = item["metadata"]["version"].partition("+")[0]  # a local build satisfies the plain version
    return ".".join(parsed["environment"]["python_full_version"].split(".")[:2]), found


def lines(resolved: dict[str, dict[str, str]]) -> list[str]:
    """Merge {X.Y: {package: version}} into constraint lines, with markers where the Pythons differ."""
    pythons = sorted(resolved, key=lambda text: int(text.split(".")[1]))
    out = []
    for name in sorted({name for found in resolved.values() for name in found}):
        runs: list[tuple[str | None, list[str]]] = []
        for python in pythons:
            version = resolved[python].get(name)
            if runs and runs[-1][0] == version:
                runs[-1][1].append(python)
            else:
                runs.append((version, [python]))
        for position, (version, members) in enumerate(runs):
            if version is None:
                continue
            newest = position == len(runs) - 1  # also holds for Pythons still to come
            first = f'python_version >= "{members[0]}"' if position > 0 else ""
            last = f'python_version <= "{members[-1]}"' if not newest else ""
            marker = " and ".join(filter(None, (first, last)))
            out.append(f"{name}=={version}" + (f"; {marker}" if marker else ""))
    return out


def main(pythons: list[str]) -> None:
    """Resolve with each Python and write constraints.txt at the root of the checkout."""
    chosen = pythons or [path for minor in SUPPORTED if (path := shutil.which(f"python{minor}"))]
    resolved = dict(resolve(python) for python in chosen)
    if missing := set(SUPPORTED) - set(resolved):
        sys.exit(f"no interpreter for Python {', '.join(sorted(missing))}: pass the path of each, or install them")
    target = ROOT / "constraints.txt"
    target.write_text(HEADER + "\n".join(lines(resolved)) + "\n")
    print(f"{target}: {len(target.read_text().splitlines())} lines for Python {', '.join(sorted(resolved))}")


if __name__ == "__main__":
    main(sys.argv[1:])
