"""Problems of a configuration: collected first, then shown together as one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: one sentence that names the key or file, the value and the rule.
        mend: the override or command that puts it right, if one can be named.
    """

    what: str
    mend: str | None = None


def error_of(problems: Sequence[Problem]) -> ConfigError:
    """Return one ConfigError that shows each distinct problem, in order, with its mend."""
    distinct = list(dict.fromkeys(problems))
    assert distinct, "an error needs a problem"
    if len(distinct) == 1:
        return ConfigError(distinct[0].what, distinct[0].mend)
    lines = [f"{len(distinct)} problems in the configuration:"]
    for number, problem in enumerate(distinct, start=1):
        lines.append(f"  {number}. {problem.what}")
        if problem.mend is not None:
            lines.append(f"     mend: {problem.mend}")
    return ConfigError("\n".join(lines))


def raise_any(problems: Sequence[Problem]) -> None:
    """Raise one ConfigError that shows every problem; do nothing when there are none."""
    if problems:
        raise error_of(problems)
