"""The sub-commands: one module each, imported when it is called.

A new sub-command is one line here and one module with `main(argv: list[str]) -> int`, which returns the exit code and
raises a MoeflowError for whatever is the user's to mend.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Verb:
    """One sub-command.

    Attributes:
        name: what the user types.
        module: where its `main` is.
        usage: the words after its name.
        summary: one line of help.
        hidden: left out of the list of `moeflow --help`.
    """

    name: str
    module: str
    usage: str
    summary: str
    hidden: bool = False


_ALL = (
    Verb("train", "moeflow.cli.train", "[+recipe=NAME] [KEY=VALUE ...]", "train a recipe, any key overridden"),
    Verb("resume", "moeflow.cli.resume", "RUN_DIR [KEY=VALUE ...]", "go on with a run from its latest checkpoint"),
    Verb("eval", "moeflow.cli.eval", "RUN_DIR [KEY=VALUE ...]", "evaluate a checkpoint of a run"),
    Verb("ls", "moeflow.cli.ls", "[DIR ...]", "list runs with their status, the newest last"),
    Verb("compare", "moeflow.cli.compare", "RUN_DIR RUN_DIR", "whether two runs are bit-equal, and where they part"),
    Verb(
        "report",
        "moeflow.cli.report",
        "RUN_DIR ...",
        "one HTML file: curves, loads of experts, layout, configuration",
    ),
    Verb("generate", "moeflow.cli.generate", "RUN_DIR [--prompt TEXT]", "write text with a run's language model"),
    Verb(
        "check",
        "moeflow.cli.check",
        "[+recipe=NAME] [KEY=VALUE ...]",
        "compose and check a configuration, start nothing",
    ),
    Verb(
        "topology",
        "moeflow.cli.topology",
        "[+recipe=NAME] [KEY=VALUE ...]",
        "which rank stands where and holds what, for any number of processes",
    ),
    Verb(
        "ckpt",
        "moeflow.cli.ckpt",
        "ls|verify|reshard|experts|export|import ...",
        "list, verify and convert checkpoints, to and from Hugging Face too",
    ),
    Verb(
        "plan",
        "moeflow.cli.plan",
        "[+recipe=NAME] [KEY=VALUE ...]",
        "propose parallel layouts for a model and a cluster, with predicted time and memory",
    ),
    Verb(
        "calibrate",
        "moeflow.cli.calibrate",
        "[+recipe=NAME] [KEY=VALUE ...]",
        "measure what the cost model of plan, balance and overlap goes by",
    ),
    Verb("recipes", "moeflow.cli.recipes", "[NAME] [--copy DIR]", "list, show and copy recipes"),
    Verb("doctor", "moeflow.cli.doctor", "", "report the environment, what works, and what mends the rest"),
    Verb("completion", "moeflow.cli.completion", "bash|zsh|fish", "print the script that gives the shell completion"),
    Verb("_complete", "moeflow.cli.complete", "SHELL LINE", "candidates for the completion scripts", hidden=True),
)

VERBS: dict[str, Verb] = {verb.name: verb for verb in _ALL}
