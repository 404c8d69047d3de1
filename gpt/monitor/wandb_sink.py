"""Weights & Biases as a sink: one W&B run with one curve, however often the program was killed and started again.

W&B's steps are those of the training. When an online run is resumed, W&B reports how many steps it has, and only later
ones are logged. An offline run starts a new file, to which the whole history is logged again from metrics.jsonl, so
`wandb sync RUN/wandb/latest-run` uploads all of it.
"""

import logging
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from gpt.settings.run import WandbSettings

logger = logging.getLogger(__name__)

RUN_ID = "wandb_run_id"
SECONDS_TO_FINISH = 50.0  # W&B stops uploading after this time; the rest stays in RUN/wandb


class WandbRun:
    """The W&B run whose id is in RUN/wandb_run_id if `is_same_run`, else a new one.

    `config` is the tree of all settings. The API key is read from the environment, by W&B.
    """

    def __init__(self, settings: WandbSettings, run_dir: Path, config: dict[str, Any], is_same_run: bool):
        self._run = _start(settings, run_dir, config, _run_id(run_dir, is_same_run))
        (run_dir / RUN_ID).write_text(self._run.id)  # in a sweep, another one: W&B has chosen it
        self._num_steps = self._run.step  # W&B has all steps below this one, and accepts none of them again

    def log(self, record: Mapping[str, Any]) -> None:
        if record["step"] >= self._num_steps:
            self._run.log(_with_table(record), step=record["step"])
            self._num_steps = record["step"] + 1

    def roll_back(self, step: int) -> None:
        """Do nothing: W&B cannot delete steps, so the repeated ones are not logged again."""

    def alert(self, title: str, text: str) -> None:
        self._run.alert(title=f"{self._run.name}: {title}", text=text)

    def log_checkpoint(self, checkpoint: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint")
        try:
            artifact.add_reference(checkpoint.resolve().as_uri(), checksum=False)
        except ValueError:  # this thread is late, and the run has deleted the checkpoint
            return
        self._run.log_artifact(artifact, aliases=["latest", checkpoint.name])

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._run.summary.update({key: value for key, value in summary.items() if key != "samples"})
        self._run.finish(exit_code=exit_code)


def _with_table(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with its texts as a table of W&B."""
    import wandb

    if "samples" not in record:
        return dict(record)
    rows = [[sample["prompt"], sample["text"]] for sample in record["samples"]]
    return {**record, "samples": wandb.Table(columns=["prompt", "text"], data=rows)}


def _run_id(run_dir: Path, is_same_run: bool) -> str:
    """Return the id of the W&B run, and write it if it is new."""
    id_file = run_dir / RUN_ID
    run_id = id_file.read_text() if is_same_run and id_file.exists() else uuid4().hex[:8]
    id_file.write_text(run_id)
    return run_id


def _start(settings: WandbSettings, run_dir: Path, config: dict[str, Any], run_id: str) -> Any:
    """Return a started W&B run; an offline one if W&B cannot be reached."""
    import wandb  # large, and runs without this sink do not need it

    def init(mode: Literal["online", "offline", "disabled"]) -> Any:
        return wandb.init(
            mode=mode,
            project=settings.project,
            name=settings.name or run_dir.name,
            group=settings.group,
            tags=settings.tags,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            config=config | {"code_version": code_version()},
            settings=wandb.Settings(console="off", finish_timeout=SECONDS_TO_FINISH),
        )

    try:
        return init(settings.mode)
    except wandb.errors.CommError as error:
        logger.warning(
            "Weights & Biases cannot be reached, so the run is logged to run.dir/wandb, for `wandb sync`: %s",
            error,
        )
        wandb.teardown()  # release the run's id, which the failed start still holds
        return init("offline")


def code_version() -> str:
    """Return the commit of the code, with "+changes" if files differ from it, or "unknown" outside a git repository."""
    root = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
