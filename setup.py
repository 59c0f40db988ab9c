"""The list of packages, found rather than written down, so that a new subpackage cannot be left out of the wheel.

Everything else stands in pyproject.toml.  The root folders `configs`, `recipes` and `kernels` hold data files alone and
are installed below `moeflow`; pyproject.toml has no way to both search for packages and map folders.
"""

from setuptools import find_packages, setup

DATA_FOLDERS = {f"moeflow.{folder}": folder for folder in ("configs", "recipes", "kernels")}

setup(
    packages=[*find_packages(include=["moeflow", "moeflow.*"]), *DATA_FOLDERS],
    package_dir=DATA_FOLDERS,
    package_data={
        "moeflow": ["py.typed"],
        "moeflow.configs": ["*.yaml", "**/*.yaml"],
        "moeflow.recipes": ["*.yaml", "**/*.yaml"],
        "moeflow.kernels": ["*.cu", "*.cuh", "**/*.cu", "**/*.cuh"],
    },
)
