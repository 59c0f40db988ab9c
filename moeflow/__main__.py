"""`python -m moeflow` is `moeflow`."""

from __future__ import annotations

import sys

from moeflow.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
