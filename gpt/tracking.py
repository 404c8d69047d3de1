"""Weights & Biases: the same metrics, the settings and the version of the code. Never the reason that a run ends."""

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from gpt.settings import Settings

logger = logging.getLogger(__name__)


class WandbRun:
    """One run; the same one again after a resume. Silent where the settings, or `is_enabled`, switch it off."""

    def __init__(self, settings: Settings, is_resumed: bool, is_enabled: bool):
        self._run: Any = None
        if is_enabled and settings.wandb.mode != "disabled":
            self._attempt(lambda: self._start(settings, is_resumed))

    def log(self, record: dict[str, Any]) -> None:
        if self._run is not None:
            self._attempt(lambda: self._run.log(record, step=record["step"]))

    def finish(self, summary: dict[str, Any]) -> None:
        if self._run is not None:
            self._attempt(lambda: self._run.summary.update(summary))
            self._attempt(lambda: self._run.finish())

    def _start(self, settings: Settings, is_resumed: bool) -> None:
        import wandb  # large, and not needed by runs without it

        run_dir = Path(settings.run.dir)
        id_file = run_dir / "wandb_run_id"
        run_id = id_file.read_text() if is_resumed and id_file.exists() else uuid4().hex[:8]
        id_file.write_text(run_id)
        self._run = wandb.init(
            mode=settings.wandb.mode,
            project=settings.wandb.project,
            name=settings.wandb.name or run_dir.name,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            config=yaml.safe_load(settings.to_yaml()) | {"code_version": code_version()},
            settings=wandb.Settings(console="off", init_timeout=60),
        )

    def _attempt(self, action: Callable[[], object]) -> None:
        """A lost network or a full disk costs the tracking, not the training."""
        try:
            action()
        except Exception as error:
            logger.warning("Weights & Biases failed and is off from here on: %s", error)
            self._run = None


def code_version() -> str:
    """The commit that the code comes from, with "+changes" where it was edited since; "unknown" outside git."""
    root = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
