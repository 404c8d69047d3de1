"""The training loop: steps, what is measured of them, evaluations, checkpoints, and how a run ends."""

import logging
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt import checkpoint
from gpt.build import Parts
from gpt.checkpoint import Progress
from gpt.console import RunConsole, step_line, summary_table
from gpt.corpus import Corpus
from gpt.export import export_live
from gpt.flops import peak_flops_per_second
from gpt.metrics import StepTraffic, Throughput, peak_memory
from gpt.plot import plot_loss
from gpt.run_files import CHECKPOINTS, LOSS_PLOT, WEIGHTS, append_record, read_steps, start_run
from gpt.saver import SaveError, Saver, keep_newest
from gpt.schedule import batch_plan, learning_rate
from gpt.settings import Settings
from gpt.tracking import WandbRun
from gpt.train_step import agree, evaluate, mean_over, train_step
from parallel.errors import ConfigError
from parallel.world import World

logger = logging.getLogger(__name__)


class Trainer:
    """Trains `parts` on a corpus, from where the run stands to its last step."""

    def __init__(self, settings: Settings, world: World, parts: Parts, corpus: Corpus, console: RunConsole):
        self._settings, self._world, self._parts = settings, world, parts
        self._corpus, self._console = corpus, console
        self._folder = Path(settings.run.dir)
        self._progress = Progress()
        saving = settings.checkpoint
        self._saver = Saver(self._folder / CHECKPOINTS, parts, keep=saving.keep, is_async=saving.asynchronous)
        recomputes = parts.activations.recomputes
        self._throughput = Throughput(settings.model, world.size, recomputes, self._peak_flops())

    @property
    def num_steps_done(self) -> int:
        return self._progress.step

    def train(self) -> None:
        """Resume, run every step that is left, and report. Raises ConfigError for what the user can put right."""
        self._resume()
        wandb = WandbRun(self._settings, self._progress.step > 0, is_enabled=self._world.is_first)
        self._throughput.restart()
        with self._console.progress(self._progress.step, self._settings.train.steps):
            for batch_size, micro_batches in self._batches():
                record = self._step(batch_size, micro_batches)
                if record and self._world.is_first:
                    append_record(self._folder, record)
                    wandb.log(record)
                self._console.advance()
        self._finish_save()
        if self._world.is_first:
            wandb.finish(self._report())

    def _resume(self) -> None:
        found = checkpoint.find(self._folder / CHECKPOINTS, self._settings.checkpoint.resume)
        if not agree(self._parts.mesh, str(found)):
            raise ConfigError(
                f"rank {self._world.rank} would go on from {found}, another rank from elsewhere; put "
                f"run.dir={self._folder} on a file system that all nodes share"
            )
        if found is not None:
            self._progress = checkpoint.load(found, self._parts)
            self._console.say(f"resumed from {found}: {self._progress.step} of {self._settings.train.steps} steps done")
        if self._world.is_first:
            start_run(self._folder, self._settings.to_yaml(), self._progress.step)
            for folder in (CHECKPOINTS, WEIGHTS):
                checkpoint.remove_partial(self._folder / folder)
            checkpoint.set_aside_later(self._folder / CHECKPOINTS, self._progress.step)
        self._parts.mesh.barrier()

    def _batches(self) -> Iterator[tuple[int, list[Tensor]]]:
        """(global batch size, this rank's micro-batches on its device) of every step that is left."""

        def plan() -> Iterator[tuple[int, int]]:
            num_left = max(0, self._settings.train.steps - first.step)
            return islice(batch_plan(self._settings.train.batch, first.consumed_samples), num_left)

        first = self._progress
        for (_, batch_size), micro_batches in zip(plan(), self._corpus.training.steps(plan()), strict=True):
            yield batch_size, [tokens.to(self._parts.device, non_blocking=True) for tokens in micro_batches]

    def _step(self, batch_size: int, micro_batches: list[Tensor]) -> dict[str, Any] | None:
        """One step and what is due after it; the record of a logged step."""
        settings, parts = self._settings, self._parts
        lr = learning_rate(settings.schedule, settings.optimizer.lr, self._progress.step, settings.train.steps)
        for group in parts.optimizer.inner.param_groups:
            group["lr"] = lr
        traffic = StepTraffic(parts.mesh.log)
        loss, grad_norm = train_step(parts.model, parts.optimizer, micro_batches, parts.mesh)
        sent = traffic.measure()
        self._progress = Progress(self._progress.step + 1, self._progress.consumed_samples + batch_size)
        self._throughput.count(batch_size)
        record = None
        is_evaluated = self._corpus.validation is not None and self._is_due(settings.train.eval_every)
        if is_evaluated or self._progress.step == 1 or self._is_due(settings.train.log_every):
            record = self._measure(loss, grad_norm, lr) | sent
            if is_evaluated:
                record |= self._evaluate()
            self._console.say(step_line(record, settings))
        if settings.checkpoint.every and self._is_due(settings.checkpoint.every):
            self._save()
        return record

    def _is_due(self, every: int) -> bool:
        """Every so many steps (0: never), and after the last one."""
        step = self._progress.step
        return step == self._settings.train.steps or (every > 0 and step % every == 0)

    def _measure(self, loss: Tensor, grad_norm: Tensor, lr: float) -> dict[str, Any]:
        """Waits for the device, and for the other ranks."""
        optimizer, progress = self._parts.optimizer, self._progress
        with self._parts.mesh.log.during("metrics"):
            mean_loss = mean_over(self._parts.mesh, loss)
        record: dict[str, Any] = {
            "step": progress.step,
            "loss": mean_loss,
            "grad_norm": grad_norm.item(),
            "lr": lr,
            "tokens": progress.consumed_samples * self._settings.model.seq_length,
        }
        record |= self._throughput.measure() | peak_memory(self._parts.device)
        record["skipped_steps"] = int(optimizer.num_skipped.item())
        if optimizer.loss_scale.is_dynamic:
            record["loss_scale"] = optimizer.loss_scale.scale.item()
        return record

    def _evaluate(self) -> dict[str, float]:
        assert self._corpus.validation is not None
        share = self._settings.train.micro_batch_size * self._parts.mesh.data.size
        num_samples = math.ceil(self._settings.train.eval_samples / share) * share
        (micro_batches,) = self._corpus.validation.steps([(0, num_samples)])
        on_device = (tokens.to(self._parts.device, non_blocking=True) for tokens in micro_batches)
        loss = evaluate(self._parts.model, on_device, self._parts.mesh)
        self._throughput.restart()
        return {"validation_loss": loss, "validation_perplexity": float(torch.tensor(loss).exp())}

    def _save(self) -> None:
        """Begin the checkpoint of this step, when the one before is complete. One that fails ends no training."""
        self._finish_save()
        self._saver.start(self._progress)
        if not self._settings.checkpoint.asynchronous:
            self._finish_save()
        if self._settings.checkpoint.weights:
            self._export_weights()
        self._throughput.restart()

    def _export_weights(self) -> None:
        folder = self._folder / WEIGHTS
        try:
            export_live(self._parts, folder / checkpoint.checkpoint_name(self._progress.step))
            if self._world.is_first:
                keep_newest(sorted(folder.glob("step-*")), self._settings.checkpoint.keep)
        except OSError as error:
            logger.error("error: weights cannot be written to %s: %s; training goes on", folder, error.strerror)

    def _finish_save(self) -> None:
        is_last = self._progress.step == self._settings.train.steps
        try:
            if saved := self._saver.wait():
                self._console.say(f"saved {saved}")
        except SaveError as error:
            if is_last:
                raise
            if self._world.is_first:
                logger.error("error: %s; training goes on", error)

    def _report(self) -> dict[str, Any]:
        """The summary and the plot, of all steps, from before a resume too; returns the last record."""
        records = read_steps(self._folder)
        if not records:
            return {}
        self._console.show(summary_table(self._settings, self._parts, records))
        plot_loss(records, self._folder / LOSS_PLOT)
        self._console.say(f"{self._folder / LOSS_PLOT} shows the loss, {self._folder} holds the rest")
        return records[-1]

    def _peak_flops(self) -> float | None:
        train, device = self._settings.train, self._parts.device
        if train.peak_tflops is not None:
            return train.peak_tflops * 1e12
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return peak_flops_per_second(name, train.dtype)
