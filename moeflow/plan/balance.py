"""One step's balance of one layer: rows over replicas, and shadows on top, from the counts that all ranks share.

This is what a layer calls in each step.  Everything is whole-number arithmetic, so ranks that share counts, plan and
costs decide the same.

Legend: R ranks of the expert-parallel group, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeflow.plan.layer_cost import Work, work_of
from moeflow.plan.replicas import ReplicaPlan, split_rows, work_with_replicas
from moeflow.plan.shadow import RowCosts, ShadowChoice, ShadowProblem, choose_shadows


@dataclass(frozen=True, slots=True)
class StepBalance:
    """What one layer does in one step.

    Attributes:
        shadows: what was decided, and the prediction.
        work: rows by rank and expert, and by sender and receiver.
        moves: int64 [R, E, R] rows by sender, expert and receiver, shadowed experts left out (their rows stay where
            they are); None without replicas, where all of an expert's rows go to its owner.
    """

    shadows: ShadowChoice
    work: Work
    moves: NDArray[np.int64] | None = None


def balance_step(
    counts: NDArray,
    plan: ReplicaPlan | NDArray,
    costs: RowCosts,
    previous: tuple[int, ...] = (),
    margin: float = 0.03,
    shadow: bool = True,
) -> StepBalance:
    """Decide one step of one layer.

    Args:
        counts: int [R, E] rows that each rank has for each expert, the same on all ranks.
        plan: replicas, or an int [E] owner of each expert where there are none.
        costs: from `shadow.row_costs`.
        previous: experts that were shadowed in the step before.
        margin: share of the step's time that a change of the shadows must gain.
        shadow: False only splits rows over replicas.
    """
    counts = np.asarray(counts, dtype=np.int64)
    if not isinstance(plan, ReplicaPlan):
        choice = choose_shadows(counts, plan, costs, previous, margin) if shadow else ShadowChoice((), 0, 0)
        return StepBalance(choice, work_of(counts, plan, choice.experts))
    moves = split_rows(counts, plan)
    if not shadow:
        return StepBalance(ShadowChoice((), 0, 0), work_with_replicas(moves), moves)
    owner = plan.owner()
    problem = ShadowProblem(counts, owner, costs, moves.sum(0), moves)
    choice = choose_shadows(counts, owner, costs, previous, margin, problem)
    if not choice.experts:
        return StepBalance(choice, work_with_replicas(moves), moves)
    chosen = list(choice.experts)
    rest, local = counts.copy(), np.zeros_like(counts)
    rest[:, chosen], local[:, chosen] = 0, counts[:, chosen]
    # The other experts' rows are split anew, around what every rank now computes of the shadowed ones.
    moves = split_rows(rest, plan, local.sum(1).tolist())
    return StepBalance(choice, work_with_replicas(moves, local), moves)
