"""Weights & Biases as a sink: one run and one curve, however often the program was killed and started again.

Steps are W&B's own steps. An online run says how far its history goes; an offline one starts an empty file, which then
gets the history from metrics.jsonl: `wandb sync RUN/wandb/latest-run` sends all of it.
"""

import logging
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import yaml

from gpt.settings import Settings

logger = logging.getLogger(__name__)

RUN_ID = "wandb_run_id"
SECONDS_TO_FINISH = 50.0  # then the process ends, and what is not sent yet waits in RUN/wandb


class WandbRun:
    """The run that RUN/wandb_run_id names, where `is_same_run`; else a new one. The key is W&B's own affair."""

    def __init__(self, settings: Settings, is_same_run: bool):
        self._run = _start(settings, _run_id(Path(settings.run.dir), is_same_run))
        self._num_steps = self._run.step  # W&B has all below this, and takes none of them again

    def log(self, record: Mapping[str, Any]) -> None:
        if record["step"] >= self._num_steps:
            self._run.log(dict(record), step=record["step"])
            self._num_steps = record["step"] + 1

    def roll_back(self, step: int) -> None:
        """W&B takes nothing back: the steps that come again are left out here."""

    def alert(self, title: str, text: str) -> None:
        self._run.alert(title=f"{self._run.name}: {title}", text=text)

    def refer_to(self, checkpoint: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint")
        artifact.add_reference(checkpoint.resolve().as_uri(), checksum=False)
        self._run.log_artifact(artifact, aliases=["latest", checkpoint.name])

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=exit_code)


def _run_id(run_dir: Path, is_same_run: bool) -> str:
    id_file = run_dir / RUN_ID
    run_id = id_file.read_text() if is_same_run and id_file.exists() else uuid4().hex[:8]
    id_file.write_text(run_id)
    return run_id


def _start(settings: Settings, run_id: str) -> Any:
    import wandb  # large, and not needed by runs without it

    def init(mode: Literal["online", "offline", "disabled"]) -> Any:
        return wandb.init(
            mode=mode,
            project=settings.wandb.project,
            name=settings.wandb.name or Path(settings.run.dir).name,
            group=settings.wandb.group,
            tags=settings.wandb.tags,
            id=run_id,
            resume="allow",
            dir=settings.run.dir,
            config=yaml.safe_load(settings.to_yaml()) | {"code_version": code_version()},
            settings=wandb.Settings(console="off", finish_timeout=SECONDS_TO_FINISH),
        )

    try:
        return init(settings.wandb.mode)
    except wandb.errors.CommError as error:
        logger.warning("Weights & Biases cannot be reached, so the run is kept for `wandb sync`: %s", error)
        wandb.teardown()  # the failed start still holds the run's id
        return init("offline")


def code_version() -> str:
    """The commit that the code comes from, with "+changes" where it was edited since; "unknown" outside git."""
    root = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
