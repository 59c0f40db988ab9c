"""`moeflow doctor`: what this machine is, what works on it, and the command that mends what does not.

finding.py       one line of the report
machine.py       Python, cores, memory, limits, GPUs
packages.py      versions against the accepted ranges
surroundings.py  run folder, host name, interfaces, launchers
trials.py        the trials themselves, each run as a process of its own
trying.py        runs them with a time limit and judges what they leave
report.py        prints it
"""

from __future__ import annotations

import math

from rich.console import Console

from moeflow.cli.arguments import Arguments
from moeflow.cli.doctor.finding import Finding
from moeflow.cli.doctor.machine import check_gpus, list_gpus, read_machine
from moeflow.cli.doctor.packages import read_packages
from moeflow.cli.doctor.report import as_json, print_report, works
from moeflow.cli.doctor.surroundings import read_surroundings
from moeflow.cli.doctor.trying import try_all
from moeflow.errors import ConfigError

DEFAULT_LIMIT_S = 60.0


def main(argv: list[str]) -> int:
    """Run `moeflow doctor`.

    Returns:
        0 when all that training on CPU needs works, 1 otherwise.

    Raises:
        ConfigError: a flag is unknown, or the time limit is not a positive number.
    """
    parser = Arguments("doctor", words=None)
    parser.flag("--json", action="store_true", help="print the report as JSON")
    parser.flag(
        "--timeout", metavar="SECONDS", default=str(DEFAULT_LIMIT_S), help="time limit of each trial (default 60)"
    )
    args = parser.read(argv)
    if args.help:
        print(parser.help_text())
        return 0
    findings = examine(_seconds(args.timeout), quiet=args.json)
    if args.json:
        print(as_json(findings))
    else:
        print_report(findings, Console(highlight=False))
    return 0 if works(findings) else 1


def examine(limit_s: float, quiet: bool) -> list[Finding]:
    """Look at everything; shows what is being tried on a terminal unless `quiet`."""
    console = Console(stderr=True, highlight=False, quiet=quiet)
    with console.status("looking at the machine") as status:
        looked = [*read_machine(), *read_packages(), *read_surroundings()]
        gpus, failure = list_gpus()
        tried, torch = try_all(limit_s, lambda title: status.update(f"trying {title}"))
    seen = check_gpus(gpus, failure, torch)
    last = max(index for index, finding in enumerate(looked) if finding.group == seen[0].group)
    return [*looked[: last + 1], *seen, *looked[last + 1 :], *tried]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(
            f"moeflow doctor --timeout {text}: seconds above 0 are expected", "moeflow doctor --timeout 60"
        )
    return value
