"""The training loop: steps and their metrics, evaluations, checkpoints, and the end of a run."""

import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from data.documents import MicroBatch
from gpt.audit import Auditor, compare_replicas
from gpt.builder.loss_guard import RollBacks, SkippedInARow
from gpt.builder.train_state import TrainState
from gpt.checkpoint.layout import INITIAL_WEIGHTS, TOKENIZER, Progress
from gpt.checkpoint.recovery import Recovery
from gpt.corpus import Corpus
from gpt.generate import sample_texts
from gpt.mixture import arrange, mixture_at
from gpt.monitor.collectives import profiled
from gpt.monitor.console import RunConsole, nothing_left
from gpt.monitor.metrics import Throughput, memory_by_kind, peak_flops, peak_memory, sent_bytes
from gpt.monitor.node_map import find_nodes, node_table
from gpt.monitor.profiling import Profiler, straggler_lines, timer_table
from gpt.monitor.records import Records
from gpt.monitor.watch import Watch
from gpt.settings.schedule import batch_plan, consumed_samples_after, learning_rate
from gpt.settings.settings import Settings
from gpt.train_step import evaluate, mean_over, train_step
from parallel.world import World

if TYPE_CHECKING:
    from gpt.tasks import Task


class Trainer:
    """The training of `state` on a corpus, from the newest checkpoint, if there is one, to the last step."""

    def __init__(
        self, settings: Settings, world: World, state: TrainState, corpus: Corpus, console: RunConsole, watch: Watch
    ):
        self._settings, self.state, self._corpus, self._console = settings, state, corpus, console
        self._progress = Progress()
        self._records = Records(settings, world.is_first)
        self._watch = watch
        watch.on_abort = self._records.on_abort
        self._recovery = Recovery(
            settings.checkpoint,
            self._records.folder,
            state,
            {
                **replace(settings, activations=state.activations).order_of_samples,
                INITIAL_WEIGHTS: settings.train.initial_weights,
                TOKENIZER: corpus.tokenizer.vocabulary_hash if corpus.tokenizer else None,
            },
            console.report,
            self._watch.beat,
            self._records.on_save,
        )
        self._recovery.on_failure = self._records.on_failed_save
        train = settings.train
        self._tasks: list[Task] = []
        if train.tasks:
            from gpt.tasks import load_tasks

            self._tasks = load_tasks(train.tasks, corpus.tokenizer, settings.model.seq_length, train.task_questions)
        nodes = find_nodes(world)
        console.show(node_table(nodes, state.mesh))
        places = [f"node {node}, local rank {rank % world.local_size}" for rank, node in enumerate(nodes)]
        self._auditor = Auditor(settings.guard.audit_every, state, corpus.training, places)
        self._profiler = Profiler(settings.profile, state.mesh, state.device, self._records.folder, nodes)
        layout = {
            "ranks": world.size,
            "zero_stage": settings.zero.stage,
            "tensor_size": state.mesh.tensor.size,
            "context_size": state.mesh.context.size,
        }
        self._throughput = Throughput(
            settings.model,
            corpus.tokens_per_sample,
            layout,
            state.activations.recomputes,
            peak_flops(settings.train, state.device),
        )

    @property
    def num_steps_done(self) -> int:
        """The number of steps that are done, those before a resume included."""
        return self._progress.step

    def train(self) -> None:
        """Resume, run every step that is left, and report. Raises ConfigError for errors that the user can correct."""
        try:
            # First, because it removes later steps from metrics.jsonl, from which sinks get the history.
            samples_before = partial(consumed_samples_after, self._settings.train)
            self._progress = self._recovery.resume(self._settings.to_yaml(), samples_before)
            first = self._progress.step
            self._watch.saved()  # from here on, time counts to the next one
            with (
                self._records.tracked(first),
                self._watch.handling_signals(),
                self._console.progress(first, self._settings.train.steps),
            ):
                roll_backs = RollBacks(self._settings.guard, self.state.guard)
                while not self._run_steps(roll_backs):
                    pass
                self._auditor.raise_found()
                if self._watch.has_stopped:
                    self._stop(roll_backs)
                self._recovery.finish()
                self._records.report(self.state, self._console)
            if first >= self._settings.train.steps:
                self._console.say(nothing_left(self._settings, self._progress.step))
        finally:
            self._recovery.release()

    def _stop(self, roll_backs: RollBacks) -> None:
        """Save what a run has reached that is stopped by a signal, unless it has to go back behind a bad loss."""
        stopped = f"stopped by a signal after step {self._progress.step}"
        if roll_backs.is_due(self._progress.step):
            self._console.say(
                f"{stopped}, after a bad loss: not saved; the next start resumes from the checkpoint before"
            )
        else:
            self._console.say(f"{stopped}; start again to resume")
            self._recovery.save(self._progress_to_save())

    def _run_steps(self, roll_backs: RollBacks) -> bool:
        """Run steps until the last one, a signal or a roll-back; return False after a roll-back."""
        self._throughput.restart()
        self._auditor.restart()
        log = self.state.mesh.log
        num_skipped = int(self.state.optimizer.num_skipped.item())  # before the first step: the device is idle
        skipped_in_a_row = SkippedInARow(self._settings.guard.max_skipped_steps, self._progress.step, num_skipped)
        # Closed here if a step fails: its traceback would keep the thread that reads ahead alive.
        with closing(self._batches()) as batches:
            while True:
                self._profiler.begin(self._progress.step + 1)
                with log.during("data"):
                    batch = next(batches, None)
                if batch is None or not self._watch.may_begin(self._progress.step + 1):
                    return True
                record = self._step(*batch)
                self._watch.beat()
                self._console.advance()
                if record:
                    self._records.append(record)
                    skipped_in_a_row.check(record["step"], record["skipped_steps"])
                # Before a save: a roll-back goes to the newest checkpoint, which has to be older than the bad loss.
                saves = self._due_saves()
                if (record or any(saves)) and roll_backs.is_due(self._progress.step):
                    self._progress = self._recovery.roll_back(self._progress)
                    self._records.roll_back(self._progress.step)
                    return False
                self._check_and_save(*saves)
                if timers := self._profiler.end(self._progress.step):
                    self._console.show(timer_table(timers))
                    self._console.say("\n".join(straggler_lines(timers, self._profiler.nodes)) or "no stragglers")

    def _due_saves(self) -> tuple[bool, bool]:
        """Return whether a snapshot and a checkpoint are due after this step."""
        saves, step = self._settings.checkpoint, self._progress.step
        is_snapshot_due = bool(saves.snapshot_every) and step % saves.snapshot_every == 0
        is_last = step == self._settings.train.steps and (saves.last or saves.every > 0)
        is_checkpoint_due = is_last or (saves.every > 0 and step % saves.every == 0)
        # First the watch, which all ranks ask after each step.
        return is_snapshot_due, self._watch.is_save_due() or is_checkpoint_due

    def _check_and_save(self, is_snapshot_due: bool, is_checkpoint_due: bool) -> None:
        """Compare replicas, if this is due after this step, and save."""
        step, every = self._progress.step, self._settings.guard.check_replicas_every
        if every and step % every == 0:
            compare_replicas(self.state, step)
        for is_due, save in (
            (is_snapshot_due, self._recovery.save_snapshot),
            (is_checkpoint_due, self._recovery.save),
        ):
            if is_due:
                self._auditor.raise_found()  # a state that is known to be damaged is not saved
                with self.state.mesh.log.during("checkpoint"):
                    save(self._progress_to_save())
                self._throughput.restart()
        if is_checkpoint_due:
            self._watch.saved()

    def _progress_to_save(self) -> Progress:
        """Return the progress with where the run stands in each corpus."""
        return replace(self._progress, mixture=mixture_at(self._corpus.samples, self._progress.consumed_samples))

    def _batches(self) -> Generator[tuple[int, list[MicroBatch]], None, None]:
        """Yield (global batch size, this rank's micro-batches on its device) of every step that is left."""
        train, start = self._settings.train, self._progress
        arrange(self._corpus.samples, self._settings.data.schedule, train, start)
        num_steps_left = max(0, train.steps - start.step)

        def plan() -> Iterator[tuple[int, int]]:
            return islice(batch_plan(train, start.consumed_samples), num_steps_left)

        with closing(self._corpus.training.steps(plan())) as steps:
            for (_, batch_size), micro_batches in zip(plan(), steps, strict=True):
                yield batch_size, [batch.to(self.state.device, non_blocking=True) for batch in micro_batches]

    def _step(self, batch_size: int, micro_batches: list[MicroBatch]) -> dict[str, Any] | None:
        """Run one step, and return its record if it is logged."""
        settings, state, step = self._settings, self.state, self._progress.step + 1
        lr = learning_rate(settings.schedule, settings.optimizer.lr, step - 1, settings.train.steps)
        state.set_learning_rate(lr)
        sent_before = sent_bytes(state.mesh.log)
        norms: dict[str, Tensor] = {}
        every = settings.train.layer_grad_norms_every

        def measure_layer_norms() -> None:
            if every and step % every == 0:
                norms.update(state.optimizer.grad_norm.by_layer(state.model.module))

        # On the whole first tensor group: compiled blocks run eager in this step. If they did so on one rank only, the
        # gradients of parameters that the group replicates would differ.
        is_profiled = state.mesh.data.rank == 0 and step == settings.profile.collectives_step
        folder = self._records.folder if state.mesh.rank == 0 else None
        samples = self._progress.consumed_samples, batch_size
        with (
            self._auditor.step(step, samples, micro_batches) as leaves,
            profiled(state.mesh.log, folder) if is_profiled else nullcontext(),
        ):
            loss, grad_norm = train_step(
                state.model, state.optimizer, micro_batches, state.mesh, state.guard, measure_layer_norms, leaves
            )
        sent = {name: number - sent_before[name] for name, number in sent_bytes(state.mesh.log).items()}
        self._progress = replace(self._progress, step=step, consumed_samples=sum(samples))
        self._throughput.count(batch_size)
        trials = self._due_trials()
        if not trials and step > 1 and not self._is_due(settings.train.log_every):
            return None
        record = self._measure(loss, grad_norm, lr) | sent
        record |= {f"grad_norm/{layer}": norm.item() for layer, norm in norms.items()}
        for trial in trials:
            record |= trial()
            self._throughput.restart()
        self._console.log_step(record, settings.train, self._corpus.tokens_per_sample)
        return record

    def _due_trials(self) -> list[Callable[[], dict[str, Any]]]:
        """Return the trials of the model that are due after this step; the results of each belong to the record."""
        train, corpus = self._settings.train, self._corpus
        trials = (
            (bool(corpus.validation), train.eval_every, self._evaluate),
            (bool(self._tasks), train.task_every, self._judge),
            (bool(corpus.tokenizer and train.sample_tokens), train.sample_every, self._sample),
        )
        return [trial for is_possible, every, trial in trials if is_possible and self._is_due(every)]

    def _is_due(self, every: int) -> bool:
        """Return True every `every` steps (0: never) and after the last one."""
        step = self._progress.step
        return step == self._settings.train.steps or (every > 0 and step % every == 0)

    def _measure(self, loss: Tensor, grad_norm: Tensor, lr: float) -> dict[str, Any]:
        """Return the record of this step. Waits for the device and for the other ranks."""
        optimizer, progress = self.state.optimizer, self._progress
        with self.state.mesh.log.during("metrics"):
            mean_loss = mean_over(self.state.mesh, loss) if self.state.leaves is None else loss.item()
        record: dict[str, Any] = {
            "step": progress.step,
            "loss": mean_loss,
            "grad_norm": grad_norm.item(),
            "lr": lr,
            "tokens": round(progress.consumed_samples * self._corpus.tokens_per_sample),
            "unix_time": round(time.time(), 3),
        }
        record |= self._throughput.measure() | peak_memory(self.state.device)
        record |= memory_by_kind(self.state.model, self.state.optimizer)
        record["skipped_steps"] = int(optimizer.num_skipped.item())
        if optimizer.loss_scale.is_dynamic:
            record["loss_scale"] = optimizer.loss_scale.scale.item()
        return record

    def _evaluate(self) -> dict[str, Any]:
        """Return the loss of each validation corpus, their mean and its perplexity. All ranks call it."""
        samples_at_once = self._settings.train.samples_at_once(self.state.mesh.num_batch_ranks)
        num_samples = math.ceil(self._settings.train.eval_samples / samples_at_once) * samples_at_once
        losses = {}
        for name, loader in self._corpus.validation.items():
            (micro_batches,) = loader.steps([(0, num_samples)])
            on_device = (batch.to(self.state.device, non_blocking=True) for batch in micro_batches)
            losses[name] = evaluate(self.state.model, on_device, self.state.mesh, self.state.leaves)
            self._watch.beat()
        loss = statistics.fmean(losses.values())
        of_corpora = {f"validation_loss/{name}": value for name, value in losses.items() if name}
        return {"validation_loss": loss, "validation_perplexity": float(torch.tensor(loss).exp()), **of_corpora}

    def _judge(self) -> dict[str, Any]:
        """Return the metrics of the tasks. All ranks call it."""
        from gpt.tasks import judge

        state, batch_size = self.state, self._settings.train.micro_batch_size
        return judge(state.model, self._tasks, state.mesh, batch_size, self._watch.beat)

    def _sample(self) -> dict[str, Any]:
        """Return texts that the model generates. All ranks call it."""
        settings, corpus, texts = self._settings, self._corpus, []
        assert corpus.tokenizer is not None
        num_tokens, seq_length = settings.train.sample_tokens, settings.model.seq_length
        with self.state.mesh.log.during("sampling"):
            for text in sample_texts(self.state.model, corpus.tokenizer, corpus.prompts, num_tokens, seq_length):
                texts.append(text)
                self._watch.beat()
        return {"samples": texts}
