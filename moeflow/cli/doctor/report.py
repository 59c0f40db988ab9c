"""The report: for people, or as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from moeflow.cli.doctor.finding import Finding

_STYLE = {"ok": "green", "note": "cyan", "warn": "yellow", "fault": "bold red"}


def works(findings: Sequence[Finding]) -> bool:
    """Whether all that training on CPU needs was found in order."""
    return all(finding.status != "fault" for finding in findings)


def print_report(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings by group, then what mends them."""
    width = max(len(finding.name) for finding in findings)
    for group, members in itertools.groupby(findings, key=lambda finding: finding.group):
        console.print(Text(f"\n{group}", style="bold"))
        for finding in members:
            line = Text.assemble(
                ("  " + finding.status.ljust(6), _STYLE[finding.status]), finding.name.ljust(width + 2)
            )
            console.print(line.append(finding.detail), soft_wrap=True)
    _print_mends(findings, console)


def _print_mends(findings: Sequence[Finding], console: Console) -> None:
    for status, title in (("fault", "mend these first"), ("warn", "and these"), ("note", "where you need it")):
        members = [finding for finding in findings if finding.status == status and finding.mend]
        if members:
            console.print(Text(f"\n{title}", style="bold"))
        for finding in members:
            console.print(Text.assemble((f"  {finding.name}: ", _STYLE[status]), str(finding.mend)), soft_wrap=True)
    console.print()
    if works(findings):
        console.print(Text("All that training on CPU needs works.", style=_STYLE["ok"]))
        console.print("  next: moeflow train +recipe=cifar_moe", soft_wrap=True)
    else:
        faults = [finding.name for finding in findings if finding.status == "fault"]
        console.print(
            Text(f"Training on CPU will not work: {', '.join(faults)}", style=_STYLE["fault"]), soft_wrap=True
        )


def as_json(findings: Sequence[Finding]) -> str:
    """Return {"works": ..., "findings": [...]}."""
    members = [dataclasses.asdict(finding) for finding in findings]
    return json.dumps({"works": works(findings), "findings": members}, indent=2)
