"""Groups, their options and the recipes, found in the folders without Hydra: for help, completion and messages."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from moeflow.config.folders import locate
from moeflow.config.plain import parse_yaml, read_text
from moeflow.errors import ConfigError

#: Groups that stand outside the primary defaults: chosen with a plus, at most one option each, applied in this order.
EXTRA_GROUPS = ("recipe", "debug")
#: Name of the primary configuration, `configs/train.yaml`.
PRIMARY = "train"


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One file that can be chosen in a group."""

    group: str
    name: str
    path: Path

    @property
    def summary(self) -> str:
        """The first sentence of the comment that the file begins with, which states its purpose."""
        comments = itertools.takewhile(lambda line: line.startswith("#"), read_text(self.path, self.group).splitlines())
        texts = (line.lstrip("# ").strip() for line in comments if "@package" not in line)
        first = " ".join(itertools.takewhile(bool, texts))
        return re.split(r"(?<=\.)\s+(?=[A-Z])", first, maxsplit=1)[0]


@functools.cache
def default_choices() -> Mapping[str, str]:
    """Return {group: option} of the primary defaults list, in its order."""
    path = locate("configs") / f"{PRIMARY}.yaml"
    defaults = parse_yaml(read_text(path, "primary configuration"), str(path))["defaults"]
    return {group: name for item in defaults if isinstance(item, dict) for group, name in item.items()}


def group_names() -> tuple[str, ...]:
    """Return every group: those of the primary defaults list, then those that are chosen with a plus."""
    return (*default_choices(), *EXTRA_GROUPS)


def options(group: str, config_dirs: Iterable[Path] = ()) -> dict[str, Option]:
    """Return the options of a group by name; moeflow's own stand before the user's.

    Args:
        group: one of `group_names()`.
        config_dirs: the user's folders (`--config-dir`), each with one folder a group.
    """
    own = locate("recipes") if group == "recipe" else locate("configs") / group
    found: dict[str, Option] = {}
    for folder in (own, *(Path(config_dir) / group for config_dir in config_dirs)):
        for path in sorted(folder.glob("*.yaml")):
            if not path.name.startswith("."):
                found.setdefault(path.stem, Option(group, path.stem, path))
    return found


def check_config_dirs(config_dirs: Sequence[Path]) -> None:
    """Check that each user folder is there, is laid out as DIR/GROUP/NAME.yaml, and shadows nothing of moeflow's.

    Raises:
        ConfigError: names the folder or file, and what to do.
    """
    for folder in config_dirs:
        if not folder.is_dir():
            state = "is not a folder" if folder.exists() else "does not exist"
            raise ConfigError(
                f"--config-dir {folder} {state}.",
                "give a folder that holds recipe/NAME.yaml",
            )
        groups = [group for group in group_names() if (folder / group).is_dir()]
        if not groups:
            hint = f"--config-dir {folder.parent}" if folder.name in group_names() else f"mkdir -p {folder}/recipe"
            raise ConfigError(
                f"--config-dir {folder} holds no folder named after a group (recipe, gate, ...).",
                hint,
            )
        for group in groups:
            for path in sorted((folder / group).glob("*.yaml")):
                if (shadowed := options(group).get(path.stem)) is not None:
                    raise ConfigError(
                        f"{path} has the name of moeflow's own {group} '{path.stem}' ({shadowed.path}).",
                        f"rename it, for example to my_{path.name}",
                    )
