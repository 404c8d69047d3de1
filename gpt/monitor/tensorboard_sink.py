"""TensorBoard as a sink: event files in RUN/tensorboard, which show every step once, however often the run resumed."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorboardRun:
    """The event files of one run.

    Opening them hides the steps that earlier processes logged: the whole history is logged again from metrics.jsonl.
    """

    def __init__(self, run_dir: Path):
        self._folder = run_dir / "tensorboard"
        # A thread of TensorBoard that cannot write stores its error, which the next call of the writer raises here; it
        # would also print a traceback.
        print_traceback = threading.excepthook
        threading.excepthook = lambda failed: hasattr(failed.thread, "exception") or print_traceback(failed)
        self._open(purge_step=0)

    def log(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(name, value, record["step"])
        for number, sample in enumerate(record.get("samples", [])):
            self._writer.add_text(f"sample/{number}", as_text(sample["text"]), record["step"])
        self._step = record["step"]
        self._writer.flush()  # a killed process loses nothing that was logged

    def roll_back(self, step: int) -> None:
        self._writer.close()
        self._open(purge_step=step + 1)

    def alert(self, title: str, text: str) -> None:
        self._writer.add_text(f"alert/{title}", text, self._step)
        self._writer.flush()

    def log_checkpoint(self, checkpoint: Path) -> None:
        self._writer.add_text("checkpoint", str(checkpoint.resolve()), self._step)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._writer.close()

    def _open(self, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # only users of this sink need the package

        self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)
        self._step = purge_step


def as_text(text: str) -> str:
    """Return a text as Markdown, which TensorBoard displays, with its line breaks and its spaces."""
    return "\n".join(f"    {line}" for line in text.splitlines())
