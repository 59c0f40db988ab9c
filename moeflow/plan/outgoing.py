"""What share of its tokens a rank may send to other nodes before that takes longer than the rest of the exchange."""

from __future__ import annotations

from moeflow.plan.profile import Profile


def outgoing_share(profile: Profile, ranks_per_node: int, num_nodes: int) -> float | None:
    """Share of the choices that may leave the node, so that both links are done at the same time.

    Of a rank's choices a share s leaves the node, at B_between bytes a second; of the rest, (g - 1) / g goes to the
    other g - 1 ranks of the node, at B_inside.  Both take equally long where
    s / B_between = (1 - s) (g - 1) / (g B_inside) (after FasterMoE, PPoPP 2022, section 5.3, which leaves the share to
    the user).

    Args:
        profile: of the links.
        ranks_per_node: g, ranks of the expert-parallel group on one node.
        num_nodes: nodes of the group.

    Returns:
        Between 0 and 1; None where nothing is to be limited: one node, or one rank on each.
    """
    if num_nodes < 2 or ranks_per_node < 2:
        return None
    between = profile.between.bytes_per_s / (ranks_per_node if profile.shared_nic else 1)
    ratio = (ranks_per_node - 1) / ranks_per_node * between / profile.inside.bytes_per_s
    return ratio / (1.0 + ratio)
