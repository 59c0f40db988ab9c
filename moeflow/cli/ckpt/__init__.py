"""`moeflow ckpt`: list, verify and convert checkpoints.  None of its commands changes the folder it reads."""

from __future__ import annotations

import dataclasses
import importlib

from moeflow.cli.arguments import Arguments, add_verbosity
from moeflow.errors import ConfigError, did_you_mean


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One command of `moeflow ckpt`: `call` of `module`, with the parsed words."""

    name: str
    module: str
    usage: str
    summary: str
    words: int


_ALL = (
    Task("ls", "look", "RUN_DIR", "list the checkpoints of a run", 1),
    Task("verify", "look", "RUN_DIR [--step N]", "compare every file with its checksum", 1),
    Task("reshard", "make", "RUN_DIR NEW_DIR [KEY=VALUE ...]", "copy a checkpoint into a run of another layout", 2),
    Task("experts", "make", "RUN_DIR NEW_DIR --duplicate N ...", "begin a run with another number of experts", 2),
    Task("export", "exchange", "RUN_DIR OUT_DIR", "write a gpt model as a Hugging Face folder", 2),
    Task("import", "exchange", "SOURCE_DIR NEW_DIR [KEY=VALUE ...]", "begin a run from Hugging Face or DeepSpeed", 2),
)
TASKS = {task.name: task for task in _ALL}


def arguments() -> Arguments:
    """Return the flags of all tasks."""
    parser = Arguments("ckpt", words="words")
    parser.flag("--step", metavar="N", help="checkpoint to read; the latest where left out")
    parser.flag("--weights-only", action="store_true", help="reshard: leave the optimizer's state behind")
    parser.flag("--duplicate", metavar="N", help="experts: every expert N times")
    parser.flag("--drop", metavar="A,B,...", help="experts: without these")
    parser.flag("--keep", metavar="A,B,...", help="experts: these alone, in this order")
    parser.flag("--upcycle", metavar="N", help="experts: N copies of each dense MLP")
    parser.flag("--noise", metavar="S", default="0", help="experts: deviation added to copies, relative to theirs")
    parser.flag("--seed", metavar="S", default="0", help="experts: of the noise and of new gates")
    parser.flag(
        "--rename",
        metavar="OLD:NEW",
        action="append",
        default=[],
        help="import from DeepSpeed: beginning of names to replace (may be repeated)",
    )
    parser.flag("--family", metavar="NAME", help="export: family of models; the first that fits where left out")
    parser.flag("--dtype", metavar="TYPE", default="fp32", help="export: fp32, bf16 or fp16 (fp32)")
    add_verbosity(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run `moeflow ckpt`; returns the exit code."""
    from moeflow import logging

    parser = arguments()
    args = parser.read(argv)
    if args.help or not args.words:
        width = max(len(task.name) for task in _ALL)
        lines = [f"  {task.name:<{width}}  {task.usage:<36}  {task.summary}" for task in _ALL]
        print("\n".join([parser.help_text(), "", "commands:", *lines]))
        return 0
    logging.setup(args.verbosity)
    name, *words = args.words
    if name not in TASKS:
        raise ConfigError(f"moeflow ckpt has no command '{name}'.{did_you_mean(name, TASKS)}", "moeflow ckpt --help")
    task = TASKS[name]
    missing = task.words - len([word for word in words[: task.words] if "=" not in word or word.startswith(("/", "."))])
    if missing:
        raise ConfigError(f"moeflow ckpt {name} needs {task.words} folders: {task.usage}", "moeflow ckpt --help")
    module = importlib.import_module(f"moeflow.cli.ckpt.{task.module}")
    return getattr(module, f"{name}_")(args, words)
