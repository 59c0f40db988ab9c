"""Installed packages against the ranges that moeflow's own metadata state."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator

from packaging.requirements import Requirement

from moeflow.cli.doctor.finding import Finding

GROUP = "packages"
SHOWN_EXTRAS = ("deepspeed", "tensorboard", "wandb", "hf", "cuda12", "cuda13")
FOR_GPUS = ("cuda12", "cuda13")  # the trial of CuPy says which of the two is wanted, where there is a GPU


def read_packages() -> list[Finding]:
    """Look at this environment."""
    try:
        requires = importlib.metadata.requires("moeflow") or []
    except importlib.metadata.PackageNotFoundError:
        detail = "it is not installed, so its data folders are not found"
        return [Finding(GROUP, "moeflow", "fault", detail, "pip install -e .   (in the checkout)")]
    return [
        Finding(GROUP, "moeflow", "ok", importlib.metadata.version("moeflow")),
        *check_packages(requires, installed_version),
        *check_cupy_builds([name for name in ("cupy", "cupy-cuda12x", "cupy-cuda13x") if installed_version(name)]),
    ]


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages(requires: Iterable[str], version_of: Callable[[str], str | None]) -> list[Finding]:
    """Judge every requirement.

    Args:
        requires: requirement lines, as in the metadata of a distribution.
        version_of: name -> installed version or None.
    """
    found = []
    for requirement, extra in _each(requires):
        version, wanted = version_of(requirement.name), str(requirement.specifier)
        exact = f'pip install "{requirement.name}{wanted}"'
        if version is None and extra is None:
            found.append(Finding(GROUP, requirement.name, "fault", f"not installed; {wanted} is needed", exact))
        elif version is None and extra in FOR_GPUS:
            continue
        elif version is None:
            found.append(Finding(GROUP, requirement.name, "note", "not installed", _install(str(extra))))
        elif not requirement.specifier.contains(version, prereleases=True):
            detail = f"{version} is outside {wanted}"
            found.append(Finding(GROUP, requirement.name, "fault" if extra is None else "warn", detail, exact))
        else:
            found.append(Finding(GROUP, requirement.name, "ok", f"{version} ({wanted})"))
    return found


def check_cupy_builds(installed: list[str]) -> list[Finding]:
    """Two distributions of CuPy overwrite each other's files."""
    if len(installed) < 2:
        return []
    detail = f"{' and '.join(installed)} are both installed and overwrite each other"
    mend = f"pip uninstall -y {' '.join(installed)}; then install one: {_install('cuda12')}"
    return [Finding(GROUP, "cupy", "warn", detail, mend)]


def _each(requires: Iterable[str]) -> Iterator[tuple[Requirement, str | None]]:
    """Yield (requirement, extra that brings it) for what every run needs and for the extras a user may want."""
    parsed = [Requirement(line) for line in requires]
    seen = set()
    for extra in (None, *SHOWN_EXTRAS):
        for requirement in parsed:
            marker = requirement.marker
            mine = marker is None or marker.evaluate({"extra": extra or ""})
            if mine and requirement.name not in seen and requirement.name != "moeflow":
                seen.add(requirement.name)
                yield requirement, extra


def _install(extra: str) -> str:
    return f'pip install "moeflow[{extra}]"' + (" --no-build-isolation" if extra == "deepspeed" else "")
