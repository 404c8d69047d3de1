"""Sinks of logged metrics, alerts and paths of checkpoints: TensorBoard and Weights & Biases.

    training ---- queue ----> a thread ----> W&B            one queue and thread per sink: a sink that hangs or fails
             `--- queue ----> a thread ----> TensorBoard    is switched off, and never delays or stops the training

A sink first gets all steps of metrics.jsonl, and is complete even if the run resumes, or was killed and lost data:
TensorBoard shows every step once, and W&B has one run with one curve, however often the program was started.
"""

import logging
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, Literal
from uuid import uuid4

import yaml

from gpt.settings.run import WandbSettings
from gpt.settings.settings import Settings
from parallel.validation.files import read_note
from parallel.validation.paths import unlink_link

logger = logging.getLogger(__name__)

MAX_PENDING = 100_000  # calls in the queue of a sink, above which it is switched off
RUN_ID, LOGGED = "wandb_run_id", "logged"
SECONDS_TO_UPLOAD = 50.0  # W&B stops uploading after this time; the rest stays in RUN/wandb


class TensorboardRun:
    """The event files of one run, in RUN/tensorboard, with the last step that is in them, in the file `logged`.

    Opening them hides the steps after `last_step`, and those that an earlier process may not have written: these are
    logged again, if they are in the history.
    """

    def __init__(self, run_dir: Path, last_step: int):
        self._folder, self._step = run_dir / "tensorboard", last_step
        # A thread of TensorBoard that cannot write stores its error, which the next call of the writer raises here; it
        # would also print a traceback.
        print_traceback = threading.excepthook
        threading.excepthook = lambda failed: hasattr(failed.thread, "exception") or print_traceback(failed)
        found = read_note(self._folder / LOGGED)
        self._open(min(last_step, int(found)) if found.isdecimal() else 0)

    def log(self, record: Mapping[str, Any]) -> None:
        """Record a logged step, unless the sink has it already."""
        if record["step"] <= self._step:
            return
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(name, value, record["step"])
        for number, sample in enumerate(record.get("samples", [])):
            # As Markdown, which TensorBoard displays, with its line breaks and its spaces
            text = "\n".join(f"    {line}" for line in sample["text"].splitlines())
            self._writer.add_text(f"sample/{number}", text, record["step"])
        self._step = record["step"]
        self._writer.flush()  # a killed process loses nothing that was logged
        self._note_step()

    def roll_back(self, step: int) -> None:
        """Discard what was logged after `step`; those steps will be logged again."""
        self._writer.close()
        self._open(step)

    def alert(self, title: str, text: str) -> None:
        """Notify people who follow the run."""
        self._writer.add_text(f"alert/{title}", text, self._step)
        self._writer.flush()

    def log_checkpoint(self, checkpoint: Path) -> None:
        """Record the path of a checkpoint; its files are not copied."""
        self._writer.add_text("checkpoint", str(checkpoint.resolve()), self._step)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Record how the run ended, and close the sink."""
        self._writer.close()

    def _open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # only users of this sink need the package

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)
        self._step = step
        unlink_link(self._folder / LOGGED)
        self._note_step()

    def _note_step(self) -> None:
        (self._folder / LOGGED).write_text(str(self._step))


class WandbRun:
    """The W&B run whose id is in RUN/wandb_run_id if `is_same_run`, else a new one, with the methods of TensorboardRun.

    W&B's steps are those of the training. When an online run is resumed, W&B reports how many steps it has, and only
    later ones are logged. An offline run starts a new file, to which the whole history is logged again, so
    `wandb sync RUN/wandb/latest-run` uploads all of it. `config` is the tree of all settings. The API key is read from
    the environment, by W&B.
    """

    def __init__(self, settings: WandbSettings, run_dir: Path, config: dict[str, Any], is_same_run: bool):
        id_file = run_dir / RUN_ID
        run_id = (read_note(id_file) if is_same_run else "") or uuid4().hex[:8]
        unlink_link(id_file)
        id_file.write_text(run_id)
        self._run = _start_wandb(settings, run_dir, config, run_id)
        id_file.write_text(self._run.id)  # in a sweep, another one: W&B has chosen it
        self._num_steps = self._run.step  # W&B has all steps below this one, and accepts none of them again

    def log(self, record: Mapping[str, Any]) -> None:
        if record["step"] < self._num_steps:
            return
        content = dict(record)
        if "samples" in record:
            import wandb

            rows = [[sample["prompt"], sample["text"]] for sample in record["samples"]]
            content["samples"] = wandb.Table(columns=["prompt", "text"], data=rows)
        self._run.log(content, step=record["step"])
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


def _start_wandb(settings: WandbSettings, run_dir: Path, config: dict[str, Any], run_id: str) -> Any:
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
            settings=wandb.Settings(console="off", finish_timeout=SECONDS_TO_UPLOAD),
        )

    try:
        return init(settings.mode)
    except wandb.errors.CommError as error:
        logger.warning(
            "Weights & Biases cannot be reached, so the run is logged to run.dir/wandb, for `wandb sync`: %s", error
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


Sink = TensorboardRun | WandbRun


def sink_openers(settings: Settings, last_step: int) -> dict[str, Callable[[], Sink]]:
    """Return functions that open the sinks of a run that continues after `last_step`, by the sinks' names."""
    run_dir, config = Path(settings.run.dir), yaml.safe_load(settings.to_yaml())
    openers: dict[str, Callable[[], Sink]] = {}
    if settings.run.tensorboard:
        openers["TensorBoard"] = lambda: TensorboardRun(run_dir, last_step)
    if settings.wandb.mode != "disabled":
        is_same_run = last_step > 0 and settings.checkpoint.resume == "auto"
        openers["Weights & Biases"] = lambda: WandbRun(settings.wandb, run_dir, config, is_same_run)
    return openers


class SinkThread:
    """A thread that opens one sink, logs the `history` to it, and then makes all calls to it, in order."""

    def __init__(self, name: str, open_sink: Callable[[], Sink], history: Sequence[Mapping[str, Any]]):
        self._name, self._open, self._history = name, open_sink, history
        self._calls: Queue[Callable[[Sink], None] | None] = Queue(MAX_PENDING)
        self._has_ended = Event()
        Thread(target=self._run, name=f"tracking by {name}", daemon=True).start()

    def put(self, call: Callable[[Sink], None]) -> None:
        """Queue a call to the sink, unless it is switched off. Never blocks."""
        try:
            if not self._has_ended.is_set():
                self._calls.put_nowait(call)
        except Full:
            self._switch_off(f"is {MAX_PENDING} calls behind")

    def finish(self, seconds: float) -> None:
        """Wait until all queued calls are done, for at most `seconds`."""
        try:
            self._calls.put_nowait(None)  # ends the thread's loop after the calls before it
        except Full:
            return
        if not self._has_ended.wait(seconds):
            self._switch_off(f"has not finished within {seconds:g} s")

    def _run(self) -> None:
        try:
            sink = self._open()
            for record in self._history:
                sink.log(record)
            while call := self._calls.get():
                call(sink)
            self._has_ended.set()
        except Exception as error:  # such as a lost network, a full disk, or a bug of the sink
            self._switch_off(f"failed ({error})")

    def _switch_off(self, reason: str) -> None:
        if not self._has_ended.is_set():
            logger.warning(
                "tracking by %s %s and is switched off; metrics.jsonl still gets every step", self._name, reason
            )
            self._has_ended.set()  # last: the process may end when it is set
