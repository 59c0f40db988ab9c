"""Text from a run of a language model.

sample_at_end(session)             a sample of the model that was just trained
continue_run(config, run_dir, ..)  text from a checkpoint: what `moeflow generate` does
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeflow.errors import ConfigError
from moeflow.models.generate import continue_text
from moeflow.models.lm_task import LanguageModelTask, opening
from moeflow.parallel.prepare import leave
from moeflow.schema import ParallelConfig, RunConfig
from moeflow.train.checkpoint import CheckpointStore
from moeflow.train.session import Session, join, open_session
from moeflow.train.snapshot import Snapshot


@dataclass(frozen=True)
class Request:
    """What text is wanted.

    Attributes:
        prompt: to be continued; None takes the first words of the held-out text.
        num_tokens: tokens to add.
        temperature: logits are divided by it; 0 takes the most probable token.
        top_k: draw from so many most probable tokens; None from all.
        seed: of the draws.
        step: of the checkpoint; None takes the latest.
    """

    prompt: str | None = None
    num_tokens: int = 300
    temperature: float = 0.8
    top_k: int | None = None
    seed: int = 0
    step: int | None = None


def sample_at_end(session: Session) -> str | None:
    """Let the trained model continue the first words of the held-out text; every rank must call it.

    Returns:
        The same text on every rank; None for a model that writes none, and where the layout cuts the model itself
        (`moeflow generate` then loads it into one process).
    """
    task = session.task
    if not isinstance(task, LanguageModelTask) or session.topology["pp"].size * session.topology["tp"].size > 1:
        return None
    text: Any = session.data  # a language model's data are text
    return task.samples(session.model, text)


def continue_run(config: RunConfig, run_dir: str | Path, request: Request) -> str:
    """Load a checkpoint into this one process, whatever layout saved it, and continue the prompt.

    Args:
        config: the frozen configuration of the run; its layout is replaced by that of one process.
        run_dir: of the run.
        request: the text wanted.

    Returns:
        The prompt and what the model wrote.

    Raises:
        ConfigError: the run has no language model.
        CheckpointError: there is no such checkpoint, or it is damaged.
        DataError: the text, which holds the alphabet, is gone; or the prompt has a character outside it.
    """
    config.parallel = ParallelConfig()
    config.launch.processes = config.trainer.grad_accum = 1
    accelerator, topology = join(config)
    try:
        session = open_session(config, accelerator, topology, training=False)
        if not isinstance(session.task, LanguageModelTask):
            raise ConfigError(
                f"{run_dir}: its model ({config.model.name}) writes no text",
                "name a run of a language model (+recipe=gpt_moe)",
            )
        _load(session, run_dir, request.step)
        model = accelerator.prepare_model(session.model, device_placement=False, evaluation_mode=True)
        text: Any = session.data  # a language model's data are text
        return continue_text(
            model,
            text.tokenizer,
            opening(text) if request.prompt is None else request.prompt,
            request.num_tokens,
            context=text.eval.seq_len,
            temperature=request.temperature,
            top_k=request.top_k,
            seed=request.seed,
        )
    finally:
        leave()


def _load(session: Session, run_dir: str | Path, step: int | None) -> None:
    folder = Path(run_dir) / "checkpoints"
    store = CheckpointStore(folder, rank=0, world=1)
    try:
        found = store.choose(step)
        Snapshot(session).load_model(store, found)
    finally:
        store.close()
