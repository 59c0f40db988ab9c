"""The one family of errors that users see.

A message says what is wrong, the value at hand, the rule it broke, and what mends it.  The command line prints a
`MoeflowError` as those few lines, without a traceback, and exits with its `exit_code`.  Anything else that is raised
is a defect of moeflow and keeps its traceback.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable


class MoeflowError(Exception):
    """Base of every error that is the user's to mend.

    Args:
        what: one sentence that names the key, file or value that is wrong.
        mend: what to do about it (an override, a command); printed on a line of its own.
    """

    exit_code = 2

    def __init__(self, what: str, mend: str | None = None):
        super().__init__(what if mend is None else f"{what}\n  mend: {mend}")
        self.what = what
        self.mend = mend
        #: The command that goes on with what was interrupted; added where it is known.
        self.then: str | None = None

    def __str__(self) -> str:
        return super().__str__() + (f"\n  then: {self.then}" if self.then else "")

    def __reduce__(self) -> tuple[type[MoeflowError], tuple[str, str | None]]:
        # Default pickling would pass the joined text as `what`; errors cross process borders in the launcher.
        return (type(self), (self.what, self.mend))


class ConfigError(MoeflowError):
    """A configuration key, value or combination that cannot be run."""


class DataError(MoeflowError):
    """A data file that is missing, damaged or of another format."""


class CheckpointError(MoeflowError):
    """A checkpoint that is missing, damaged, or does not fit the model."""


class TrainingError(MoeflowError):
    """Training cannot go on: the loss or the gradients are not finite."""

    exit_code = 4


class ResourceError(MoeflowError):
    """The machine lacks the memory for the run."""


class LaunchError(MoeflowError):
    """Processes could not be started, or one of them died."""


class CollectiveError(MoeflowError):
    """A collective did not finish in time, or ranks disagree on its arguments."""

    exit_code = 3


class Stopped(KeyboardInterrupt):
    """A signal ended a command that had nothing to save.

    Attributes:
        signum: its number.
    """

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def stopped_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code of a command that was interrupted: 128 + the signal's number."""
    return 128 + (stop.signum if isinstance(stop, Stopped) else signal.SIGINT)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the entry of `valid` closest to the misspelt `name`, or None when nothing is close."""
    found = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest valid name, or "" when nothing is close."""
    close = nearest(name, valid)
    return f" Did you mean '{close}'?" if close else ""
