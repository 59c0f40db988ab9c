"""The list of packages, found rather than written down, so that a new subpackage cannot be left out of the wheel.

Everything else stands in pyproject.toml.  The root folders `configs`, `recipes` and `kernels` hold data files alone and
are installed below `moeflow`; pyproject.toml has no way to both search for packages and map folders.
"""

from setuptools import find_namespace_packages, find_packages, setup

PATTERNS = {"configs": ["*.yaml"], "recipes": ["*.yaml"], "kernels": ["*.cu", "*.cuh"]}

packages = find_packages(include=["moeflow", "moeflow.*"])
package_data = {"moeflow": ["py.typed"], "moeflow.report": ["*.css", "*.js"]}
for folder, patterns in PATTERNS.items():
    inside = find_namespace_packages(folder, exclude=["*__pycache__*"])
    for name in [f"moeflow.{folder}", *(f"moeflow.{folder}.{inner}" for inner in inside)]:
        packages.append(name)
        package_data[name] = patterns

setup(
    packages=packages,
    package_dir={f"moeflow.{folder}": folder for folder in PATTERNS},
    package_data=package_data,
)
