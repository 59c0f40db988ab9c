"""The `moeflow` command: picks the sub-command, and turns errors into messages and exit codes.

Exit codes: 0 done; 1 some jobs of a sweep failed; 2 something the user can mend (see `MoeflowError.exit_code` for
finer ones); 128 + signal when interrupted.  Any other exception is a defect of moeflow and keeps its traceback.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from collections.abc import Sequence

import moeflow
from moeflow import logging
from moeflow.cli.verbs import VERBS
from moeflow.errors import ConfigError, MoeflowError, did_you_mean, stopped_code

_EXAMPLES = """\
examples:
  moeflow train +recipe=cifar_moe
  moeflow train +recipe=cifar_moe gate=switch model.num_experts=32 optim.lr=3e-4
  moeflow train +recipe=cifar_moe launch.processes=2 parallel.ep=2
  moeflow train +recipe=cifar_moe +debug=tiny
  moeflow train +recipe=cifar_moe --multirun gate=naive,gshard,switch
  moeflow resume outputs/cifar_moe/RUN trainer.max_steps=6000
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Args:
        argv: the words after `moeflow`; those of the process where None.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    if "LOCAL_RANK" in os.environ:
        # DeepSpeed's launcher says it twice: in the environment, and in front of all words.
        words = [word for word in words if not re.fullmatch(r"--local[-_]rank=\d+", word)]
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except MoeflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stop:
        if logging.rank() == 0:
            print("interrupted", file=sys.stderr)
        return stopped_code(stop)
    except BrokenPipeError:
        # The reader (head, less) has gone; a second flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _open_streams() -> None:
    """Lead standard streams that were closed (>&-) to nowhere, before a file that is opened takes their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == number, "the lowest free number"
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def _dispatch(words: list[str]) -> int:
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # what Python makes of bytes that are no text
            raise ConfigError(f"the word {word!a} is not UTF-8 text.", "write it in UTF-8 (export LC_ALL=C.UTF-8)")
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        if words[1:] and words[1] in VERBS:
            return _dispatch([words[1], "--help"])
        print(overview())
        return 0
    if name in ("-V", "--version"):
        print(f"moeflow {moeflow.__version__}")
        return 0
    if name not in VERBS:
        raise ConfigError(f"'{name}' is no sub-command of moeflow.{_hint(name)}", _mend(name))
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder is not there any more.", "cd FOLDER") from None
    return importlib.import_module(VERBS[name].module).main(words[1:])


def overview() -> str:
    """Return the text of `moeflow --help`."""
    shown = [verb for verb in VERBS.values() if not verb.hidden]
    width = max(len(verb.name) for verb in shown)
    lines = ["usage: moeflow COMMAND [WORDS]", "", "Mixture-of-Experts training: one recipe, any parallel layout.", ""]
    lines += ["commands:", *(f"  {verb.name:<{width}}  {verb.summary}" for verb in shown), ""]
    lines += ["  moeflow COMMAND --help tells more; moeflow --version prints the version.", "", _EXAMPLES.rstrip()]
    return "\n".join(lines)


def _hint(name: str) -> str:
    return did_you_mean(name, [verb.name for verb in VERBS.values() if not verb.hidden])


def _mend(name: str) -> str:
    if "=" in name:
        return f"moeflow train {name}"
    return "moeflow --help lists the sub-commands"
