"""Compare variants of a training run over learning rates, seeds and corpora, which a YAML file lists.

    python -m lab.bench.study lab/bench/studies/mup.yaml --output runs/mup/study
    python -m lab.bench.study lab/bench/studies/mup.yaml --output runs/few --variants "muP, width 32" -- --train.steps 9

    options: --config configs/quickstart.yaml --train.eval_every 25    # of all runs
    corpora: {stdlib: runs/data/stdlib}                                # names and prefixes of token files
    seeds: [1, 2, 3]
    rates: [0.004, 0.008]                                              # learning rates, unless a variant has its own
    variants:
      adamw: --optimizer.name adamw                                    # the first one is what others are compared with
      muon: {options: --optimizer.name muon, rates: [0.008, 0.016]}

Each run is one of `pretrain_gpt.py`, in a folder of OUTPUT. All rates are tried with the first seed on the first
corpus, and other seeds and corpora have the rate with the lowest loss. Runs that are complete are not repeated, so that
the same command continues a study. OUTPUT gets tables (study.md), all curves (study.json), and a plot (study.png); with
--variants these are files of their own.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt.formats.config_files import read_section
from gpt.run_folder.files import CONFIG, read_steps
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from lab.pages.markdown import table
from lab.pages.plots import plot
from parallel.launch.preflight import split_words
from parallel.validation.errors import ConfigError, exit_on_config_error


@dataclass(frozen=True)
class Run:
    """A run of `pretrain_gpt.py`; `settings.run.dir` is the folder of its files."""

    options: tuple[str, ...]

    @cached_property
    def settings(self) -> Settings:
        return parse_settings(self.options)

    @cached_property
    def _saved(self) -> Settings:
        """The settings in the folder of the run, which are those of all that was logged there."""
        return parse_settings(["--config", f"{self.settings.run.dir}/{CONFIG}"])

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The records of the logged steps, none if the run is not complete.

        Raises ConfigError if the folder has a run with other settings.
        """
        folder = Path(self.settings.run.dir)
        steps = read_steps(folder)
        if steps and (folder / CONFIG).exists() and replace(self._saved, run=self.settings.run) != self.settings:
            raise ConfigError(f"{folder} has a run with other settings; remove it, or choose another --output")
        return steps if steps and steps[-1]["step"] == self.settings.train.steps else []

    @property
    def loss(self) -> float | None:
        """The validation loss after the last step, None if the run is not complete."""
        steps = self.steps
        return steps[-1].get("validation_loss") if steps else None

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return (tokens, value) of the logged steps that have a value of this name."""
        return [(step["tokens"], step[name]) for step in self.steps if name in step]

    def train(self, launch: str) -> float:
        """Return the loss. Start the run unless it is complete. Raises ConfigError if it fails.

        `launch` is the command before the options. The output is written beside the folder of the run.
        """
        if (loss := self.loss) is not None:
            return loss
        command = [*shlex.split(launch), *self.options]
        sys.stderr.write(f"+ {shlex.join(command)}\n")
        log = Path(f"{self.settings.run.dir}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            code = subprocess.run(command, check=False, stdout=file, stderr=file).returncode
        if code or (loss := self.loss) is None:
            raise ConfigError(f"a run has ended with exit code {code} and without a validation loss; see {log}")
        return loss


class Key(NamedTuple):
    """The place of a run in its study. The rate is None if the options have it."""

    corpus: str
    variant: str
    rate: float | None
    seed: int


class Study:
    """The runs of a study, in the folder `output`. `chosen` are the names of some variants; `more` options are last."""

    def __init__(self, path: Path, output: Path, chosen: Sequence[str] = (), more: Sequence[str] = ()):
        found = read_section(path, f"study {path}")
        if missing := {"options", "corpora", "seeds", "variants"} - {
            name for name, value in found.items() if value or name == "options"
        }:
            raise ConfigError(f"{path} has no {', '.join(sorted(missing))}; see python -m lab.bench.study --help")
        self._runs: dict[tuple[str, ...], Run] = {}  # by their options: each reads its settings once
        self._output, self._options, self._more = output, shlex.split(found["options"]), more
        self.corpora: dict[str, str] = found["corpora"]
        self._seeds: list[int] = found["seeds"]
        variants = {name: own if isinstance(own, dict) else {"options": own} for name, own in found["variants"].items()}
        if unknown := set(chosen) - variants.keys():
            raise ConfigError(f"--variants: {path} has no {', '.join(unknown)}; choose of {', '.join(variants)}")
        names = chosen or variants
        self._options_of = {name: shlex.split(variants[name]["options"]) for name in names}
        self._rates_of = {name: variants[name].get("rates") or found.get("rates") or [None] for name in names}

    def run(self, key: Key) -> Run:
        folder = self._output / key.corpus / key.variant / "-".join(str(part) for part in key[2:] if part is not None)
        of_key = [f"--data.path={self.corpora[key.corpus]}", f"--train.seed={key.seed}", f"--run.dir={folder}"]
        of_key += [] if key.rate is None else [f"--optimizer.lr={key.rate}"]
        options = (*self._options, *self._options_of[key.variant], *of_key, *self._more)
        return self._runs.setdefault(options, Run(options))

    def tried(self) -> list[Key]:
        """Return the runs that find the best rate of each variant: those of the first seed on the first corpus."""
        first = next(iter(self.corpora))
        return [Key(first, name, rate, self._seeds[0]) for name, rates in self._rates_of.items() for rate in rates]

    def chosen(self) -> list[Key]:
        """Return the runs of all seeds and corpora at the best of the rates that have been tried."""
        best = [
            min(keys, key=lambda key: or_infinity(self.run(key).loss))
            for _, keys in groupby(self.tried(), key=lambda key: key.variant)
        ]
        others = [(corpus, seed) for corpus in self.corpora for seed in self._seeds]
        return [key._replace(corpus=corpus, seed=seed) for corpus, seed in others for key in best]

    def train(self, launch: str, num_processes: int) -> None:
        """Train what is not complete. Raises ConfigError if a run fails; those that wait are then not started."""
        pool = ThreadPoolExecutor(num_processes)
        try:
            for keys in (self.tried, self.chosen):
                list(pool.map(lambda key: self.run(key).train(launch), keys()))
        finally:
            pool.shutdown(cancel_futures=True)

    def losses_of_rates(self) -> dict[str, dict[float, float]]:
        """Return the last loss of each variant and rate, of the variants that are tried at several."""
        found: dict[str, dict[float, float]] = {}
        for key in self.tried():
            loss = self.run(key).loss
            if key.rate is not None and len(self._rates_of[key.variant]) > 1 and loss is not None:
                found.setdefault(key.variant, {})[key.rate] = loss
        return found

    def curves(self, corpus: str) -> dict[str, "Curves"]:
        """Return the curves of each variant, of those seeds whose runs are all complete; {} if there are none."""
        keys = [key for key in self.chosen() if key.corpus == corpus]
        of_seeds = []
        for _, group in groupby(keys, key=lambda key: key.seed):
            curves = {key.variant: self.run(key).curve("validation_loss") for key in group}
            of_seeds += [curves] if all(curves.values()) else []
        arrays = {name: np.array([curves[name] for curves in of_seeds]) for name in (of_seeds[0] if of_seeds else ())}
        return {name: Curves(array[0, :, 0], array[:, :, 1]) for name, array in arrays.items()}


@dataclass(frozen=True, eq=False)
class Curves:
    """The validation losses of a variant, (seeds, evaluations), and the tokens before each evaluation."""

    tokens: np.ndarray
    losses: np.ndarray

    @property
    def last(self) -> np.ndarray:
        return self.losses[:, -1]

    def minus(self, baseline: "Curves") -> "Curves":
        """Return the differences between runs with the same seed, where both were evaluated."""
        tokens, own, other = np.intersect1d(self.tokens, baseline.tokens, return_indices=True)
        return Curves(tokens, self.losses[:, own] - baseline.losses[:, other])

    def tokens_to(self, loss: float) -> np.ndarray:
        """Return the tokens of each seed at which its curve, linear between evaluations, first is as low as `loss`.

        A curve that is never as low, or always, has NaN.
        """
        found = np.full(len(self.losses), math.nan)
        for seed, losses in enumerate(self.losses):
            for (before, high), (after, low) in pairwise(zip(self.tokens, losses, strict=True)):
                if low <= loss < high:
                    found[seed] = before + (after - before) * (high - loss) / (high - low)
                    break
        return found


def or_infinity(loss: float | None) -> float:
    """Return a loss, infinity for one that is unknown or NaN: it then is not the lowest."""
    return math.inf if loss is None or math.isnan(loss) else loss


def standard_error(numbers: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean over the first dim, NaN if that has one element."""
    if len(numbers) == 1:
        return np.full(numbers.shape[1:], math.nan)
    return numbers.std(axis=0, ddof=1) / math.sqrt(len(numbers))


def rates_table(of_rates: dict[str, dict[float, float]]) -> list[str]:
    """Return a table of the losses over learning rates; the lowest one of each variant is bold."""
    rates = sorted({rate for losses in of_rates.values() for rate in losses})
    rows = []
    for name, losses in of_rates.items():
        best = min(losses, key=lambda rate: or_infinity(losses[rate]))
        cells = {rate: f"**{loss:.3f}**" if rate == best else f"{loss:.3f}" for rate, loss in losses.items()}
        rows.append([name, *(cells.get(rate, "") for rate in rates)])
    return table(["learning rate", *map(str, rates)], rows)


def seeds_table(found: dict[str, Curves]) -> list[str]:
    """Return a table of the last losses, and of what each variant differs in from the first one with the same seeds.

    The loss to be reached is the highest of the last losses of the first variant.
    """
    first, baseline = next(iter(found.items()))
    target = baseline.last.max()
    rows = []
    for name, curves in found.items():
        tokens = curves.tokens_to(target)
        rows.append(
            [
                name,
                ", ".join(f"{loss:.3f}" for loss in curves.last),
                "-" if np.isnan(tokens).any() else f"{tokens.mean():,.0f}",
            ]
        )
        pairs = (curves.last - baseline.last, "+.3f"), (tokens / baseline.tokens_to(target), ".2f")
        rows[-1] += [with_error(*pair) if curves is not baseline else "" for pair in pairs]
    headings = ["last validation losses", f"tokens to {target:.3f}"]
    headings += [f"loss - that of {first}", f"tokens / those of {first}"]
    return table(["variant", *headings], rows)


def with_error(numbers: np.ndarray, form: str) -> str:
    if np.isnan(numbers).any():
        return "-"
    error = "" if len(numbers) == 1 else f" ± {standard_error(numbers):{form.lstrip('+')}}"
    return f"{numbers.mean():{form}}{error}"


def draw(of_rates: dict[str, dict[float, float]], of_corpora: dict[str, dict[str, Curves]], path: Path) -> None:
    """Draw losses over rates, if there are several, and for each corpus its curves and their differences."""
    num_panels = bool(of_rates) + 2 * len(of_corpora)
    with plot(path, num_panels, (5 * num_panels, 4)) as panels:
        for (corpus, found), left, right in zip(of_corpora.items(), panels[::2], panels[1::2], strict=False):
            draw_curves(found, left, right)
            left.set(title=f"{corpus}, mean of the seeds", xlabel="tokens", ylabel="validation loss, nats per token")
            right.set(title=f"difference from {next(iter(found))}, standard error", xlabel="tokens")
        for axes in panels[2 * len(of_corpora) :]:
            for name, losses in of_rates.items():
                axes.plot(*zip(*losses.items(), strict=True), marker=".", label=name)
            axes.set(title="one seed", xlabel="learning rate", ylabel="last validation loss")
            axes.set_xscale("log", base=2)


def draw_curves(found: dict[str, Curves], left: Any, right: Any) -> None:
    """Draw means between the lowest and the highest loss, and mean differences with their standard errors."""
    baseline = next(iter(found.values()))
    for name, curves in found.items():
        (line,) = left.plot(curves.tokens, curves.losses.mean(axis=0), marker=".", label=name)
        left.fill_between(curves.tokens, curves.losses.min(axis=0), curves.losses.max(axis=0), alpha=0.2)
        if curves is not baseline:
            gaps = curves.minus(baseline)
            mean, error = gaps.losses.mean(axis=0), standard_error(gaps.losses)
            right.plot(gaps.tokens, mean, color=line.get_color())
            right.fill_between(gaps.tokens, mean - error, mean + error, color=line.get_color(), alpha=0.2)


def write(study: Study, stem: Path) -> str:
    """Write the results of the runs that are complete, to files `stem`.*, and return the tables."""
    of_rates = study.losses_of_rates()
    of_corpora = {corpus: curves for corpus in study.corpora if (curves := study.curves(corpus))}
    tables = [rates_table(of_rates)] if of_rates else []
    tables += [[f"{corpus}:", "", *seeds_table(curves)] for corpus, curves in of_corpora.items()]
    text = "\n\n".join("\n".join(lines) for lines in tables) + "\n"
    records = [
        json.dumps(key._asdict() | {name: finite(run.curve(name)) for name in ("loss", "validation_loss")})
        for key in dict.fromkeys([*study.tried(), *study.chosen()])
        if (run := study.run(key)).loss is not None
    ]
    Path(f"{stem}.json").write_text("[\n" + ",\n".join(records) + "\n]\n")
    Path(f"{stem}.md").write_text(text)
    draw(of_rates, of_corpora, Path(f"{stem}.png"))
    return text


def finite(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float | None]]:
    """Return a curve for JSON, which has no NaN."""
    return [(tokens, value if math.isfinite(value) else None) for tokens, value in curve]


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the YAML file")
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs and of the results")
    parser.add_argument("--variants", nargs="+", default=[], help="those to train and to compare; default: all")
    parser.add_argument("--launch", default=f"{sys.executable} pretrain_gpt.py", help="command before a run's options")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time; 0: show what is complete")
    own, more = split_words(words)
    options = parser.parse_args(own)
    study = Study(options.study, options.output, options.variants, more)
    if options.processes:
        study.train(options.launch, options.processes)
    # Some of the variants have files of their own, beside those of all.
    name = "-".join(["study", *options.variants]).replace(" ", "_")
    sys.stdout.write(write(study, options.output / name))


if __name__ == "__main__":
    with exit_on_config_error(OSError):  # of the launch command, too
        main(sys.argv[1:])
