"""What a checkpoint holds of a training run, and how it is put back.

tensors   parameters, buffers and optimizer state, by global name: any layout reads them
local     random generators of one rank, and what balances its experts: exact on the same layout, drawn anew on another
meta      step, samples seen, metrics, layout
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch

from moeflow.errors import CheckpointError
from moeflow.logging import get_logger
from moeflow.parallel import state
from moeflow.parallel.engines import Engine
from moeflow.train.checkpoint import CheckpointStore, Keep
from moeflow.train.session import Session
from moeflow.train.shelf import resume_command
from moeflow.train.whole import WEIGHTS_ONLY

logger = get_logger(__name__)

# In the local state of a rank.
BALANCE = "balance"


class Snapshot:
    """Collects the state of a session and its engine, and restores it.

    Args:
        session: holds the model.
        engine: holds the optimizer; None to read the parameters alone.
    """

    def __init__(self, session: Session, engine: Engine | None = None):
        self.session, self.engine = session, engine

    def save(
        self, store: CheckpointStore, step: int, metrics: dict[str, float], keep: Keep, more: dict[str, Any]
    ) -> None:
        """Write a checkpoint, in the background if the configuration says so, and then prune; collective.

        `more` is added to its meta.
        """
        config = self.session.config
        meta = {
            "step": step,
            "samples": step * config.data.batch_size,
            "metrics": metrics,
            "layout": self._layout(),
            "recipe": config.run.recipe,
            "data": self.session.data.source,
            "fingerprint": self.session.data.fingerprint,
            **more,
        }
        assert self.engine is not None
        if not self.engine.optimizer.state:
            meta[WEIGHTS_ONLY] = True  # every step so far was left out
        wait = not config.checkpoint.background
        local = {**_random_state(), BALANCE: self.session.balance.state()}
        with self.session.balance.at_home(self.engine.optimizer):
            store.save(step, self.engine.tensors(), local, meta, wait=wait, keep=keep)

    def load(self, store: CheckpointStore, step: int, other_data: bool = False) -> dict[str, Any]:
        """Read a checkpoint into the model, the optimizer and the random generators; collective.

        Args:
            store: holds it.
            step: of the checkpoint.
            other_data: take it although it was trained on other data than those of the session.

        Returns:
            The checkpoint's meta.

        Raises:
            CheckpointError: it is damaged, does not fit, or was trained on other data.
        """
        store.verify(step)
        meta = store.read_meta(step)
        if not other_data:
            self._check_data(store, step, meta)
        assert self.engine is not None
        if meta.get(WEIGHTS_ONLY):
            logger.info("the checkpoint holds parameters alone: the optimizer starts anew")
        self.engine.load(partial(store.load, step, verify=False), optimizer=not meta.get(WEIGHTS_ONLY))
        if meta.get("layout") == self._layout():
            local = store.load_local(step)
            _set_random_state(local)
            self.session.balance.load_state(local.get(BALANCE, {}), self.engine.optimizer)
        else:
            logger.info("the checkpoint is of another layout: random generators start anew")
        return meta

    def _check_data(self, store: CheckpointStore, step: int, meta: dict[str, Any]) -> None:
        """Refuse to go on with the drawn figures where real images were, say, because the disk is not mounted."""
        data, before = self.session.data, meta.get("fingerprint")
        if before in (None, data.fingerprint):
            return
        again = resume_command(store.folder.parent, step)
        same = "data.source=synthetic" if meta.get("data") == "synthetic" else "data.root=FOLDER"
        raise CheckpointError(
            f"the checkpoint of step {step} was trained on {meta.get('data')} data ({before}), and what is found now "
            f"is {data.source} ({data.fingerprint})",
            f"{again} {same} goes on with the same data, {again} --force with these",
        )

    def load_model(self, store: CheckpointStore, step: int) -> dict[str, Any]:
        """Read the parameters alone; collective."""
        part = self.session.part
        placements = state.Placements(self.session.topology, part.sharding, part.full_shapes)
        store.load(step, state.model_tensors(part.model, placements), strict=False)
        return store.read_meta(step)

    def _layout(self) -> dict[str, int]:
        layout = self.session.topology.layout
        return {axis: getattr(layout, axis) for axis in ("world", "pp", "tp", "ep", "etp")}


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    local: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": list(words), "gauss": gauss},
    }
    if torch.cuda.is_available():
        local["cuda"] = torch.cuda.get_rng_state()
    return local


def _set_random_state(local: dict[str, Any]) -> None:
    torch.set_rng_state(local["torch"])
    python = local["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    if "cuda" in local and torch.cuda.is_available():
        torch.cuda.set_rng_state(local["cuda"])
