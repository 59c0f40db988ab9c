"""FastMoE's names, arguments and semantics: change `fmoe` to `moeflow.compat.fmoe` in a script's imports.

Runs on CPU and GPU, without a build.  It does what FastMoE documents; where FastMoE departs from that by a defect, this
does the right thing, and the docstring of the class says so.  docs/migrating.md maps every name to moeflow's own.
"""

from moeflow.compat.fmoe.distributed import DistributedGroupedDataParallel
from moeflow.compat.fmoe.layers import FMoE
from moeflow.compat.fmoe.linear import FMoELinear
from moeflow.compat.fmoe.transformer import FMoETransformerMLP

__all__ = ["DistributedGroupedDataParallel", "FMoE", "FMoELinear", "FMoETransformerMLP"]
