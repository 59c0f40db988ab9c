"""Plain top-k."""

from __future__ import annotations

from moeflow.moe.gates.base import Gate


class NaiveGate(Gate):
    """The k most probable experts; weights are their probabilities.

    With `renormalize=before` (the default) the weights equal a softmax over the k chosen logits, which is FastMoE's
    naive gate and Mixtral's router; with `none` it is OLMoE's and Qwen-MoE's.
    """
