"""What differs between two configurations, and which differences a run may take when it is resumed."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from moeflow.config.build import build, check_partial, flatten, show, to_dict
from moeflow.config.keys import POLYMORPHIC
from moeflow.config.problems import Problem, raise_any
from moeflow.schema import RunConfig

#: Keys that may change when a run goes on -> what the change does.  Every other key is part of what the checkpoint is
#: (shapes, data, sample order) and changes only with --force.
FREE: dict[str, str] = {
    "run.name": "another name in lists and trackers",
    "trainer.max_steps": "trains longer or shorter; the schedule follows unless schedule.total_steps is set",
    "trainer.stop_at": "stops at another step",
    "trainer.log_every": "logs at other steps",
    "trainer.eval_*": "evaluates at other steps, or on fewer batches",
    "trainer.skip_bad_steps": "ends after fewer or more steps that are not finite",
    "trainer.compile": "same model, compiled or not",
    "trainer.profile_*": "other steps are profiled",
    "checkpoint.*": "other checkpoints are kept from now on",
    "tracker.*": "other trackers from now on",
    "launch.*": "other processes, devices, threads or time limits",
    "parallel.*": "another layout of the same model; random streams (gate noise, dropout) start anew on it",
    "overlap.*": "rows travel in another way from now on; same model",
    "balance.*": "load is spread over the ranks in another way from now on; same model",
    "optim.lr": "the schedule is scaled to another peak from now on",
    "optim.weight_decay": "from the next step on",
    "optim.clip_norm": "from the next step on",
    "schedule.*": "the learning rate follows another curve from now on",
    "precision.*": "computes in another format; parameters stay fp32",
    "ops.*": "another implementation of the same operations",
    "gate.*capacity_factor": "experts take more or fewer tokens from the next step on",
    "gate.drop_policy": "other tokens are dropped from the next step on",
    "gate.*_coef": "auxiliary losses weigh more or less from the next step on",
    "gate.jitter": "from the next step on",
    "gate.fp32": "computes the gate in another format",
    "data.root": "the same data at another place; other data than the checkpoint's are refused",
    "data.source": "real or drawn data, where it was left open; other data than the checkpoint's are refused",
    "data.on_missing": "from the next start on",
    "data.download": "from the next start on",
    "data.num_workers": "the same samples, prepared by other processes",
    "data.eval_batch_size": "the same evaluation in other batches",
    "data.channels_last": "the same samples in another memory format",
}
#: Keys that name the run itself: a resumed run keeps them, --force or not.
FIXED = ("run.dir", "run.root", "run.recipe", "resume")


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One key that differs; `old` or `new` is `ABSENT` where only the other option has the key."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {show(self.old)} -> {show(self.new)}"


class _Absent:
    def __str__(self) -> str:
        return "(none)"


ABSENT = _Absent()


def differences(old: RunConfig, new: RunConfig) -> list[Change]:
    """Return the keys whose values differ, in the schema's order."""
    before, after = flatten(old), flatten(new)
    keys = dict.fromkeys([*before, *after])
    pairs = ((key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys)
    return [Change(*pair) for pair in pairs if pair[1] != pair[2]]


def effect(key: str) -> str | None:
    """Return what a free change of a key does, or None for a key that is not free."""
    return next((text for pattern, text in FREE.items() if fnmatch.fnmatchcase(key, pattern)), None)


def refused(changes: Iterable[Change], force: bool = False) -> list[Problem]:
    """Return the changes that a resumed run does not take.

    Args:
        changes: from `differences`.
        force: the user insists: only the keys that name the run itself are refused.
    """
    problems = []
    for change in changes:
        if change.key in FIXED:
            problems.append(
                Problem(f"{change}: a resumed run keeps its {change.key}.", "moeflow train starts another run")
            )
        elif not force and effect(change.key) is None:
            problems.append(
                Problem(
                    f"{change}: the checkpoint was made with the old value, which its parameters, optimizer state or "
                    f"sample order depend on.",
                    f"leave {change.key} out, start anew with moeflow train, or add --force to take it nevertheless",
                )
            )
    return problems


def amend(config: RunConfig, words: Sequence[str]) -> RunConfig:
    """Apply overrides to a frozen configuration.

    Args:
        config: the frozen configuration; not changed.
        words: overrides of keys, and options of groups (`tracker=wandb`), whose section then is the option's own.

    Raises:
        ConfigError: lists every word that is wrong.
    """
    # Hydra's grammar, and nothing else of Hydra, reads the words; frozen files load without it.
    from moeflow.config.overrides import read_request

    request = read_request(words)
    problems = request.problems
    for group in ("recipe", "debug"):
        if group in request.groups:
            problems.append(
                Problem(f"+{group}={request.groups[group]}: a run keeps what it was made from.", "name the keys")
            )
    for value in request.values:
        if "${" in str(value.value):
            problems.append(
                Problem(f"'{value.text}': a frozen configuration holds values only.", "write the value itself")
            )
    raise_any(problems)
    data = to_dict(config)
    classes = {section: type(getattr(config, section)) for section in POLYMORPHIC}
    if request.groups:
        from moeflow.config.composition import compose_run

        chosen = compose_run([f"{group}={option}" for group, option in request.groups.items()], rules=False).config
        for group in request.groups:
            data[group] = copy.deepcopy(to_dict(getattr(chosen, group)))
            classes |= {group: type(getattr(chosen, group))} if group in classes else {}
    for value in request.values:
        check_partial(value.as_tree(), classes, problems)
        _merge(data, value.as_tree())
    raise_any(problems)
    result = build(data, problems, classes=classes)
    raise_any(problems)
    return result


def _merge(data: dict[str, Any], tree: dict[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            _merge(data[key], value)
        else:
            data[key] = value
