"""One HTML file that shows a run, or several over one another: `moeflow report`.

    run folders -> reading -> curves, loads, phases (pictures), tables, places (text) -> page -> one file

Run folders are read and never changed.  Pictures are drawn by matplotlib, in colors that the page's style sheet fills
in, so that one file serves light and dark screens.  Nothing is fetched: the file opens offline.
"""

from __future__ import annotations

from moeflow.report.page import Report, make_report

__all__ = ["Report", "make_report"]
