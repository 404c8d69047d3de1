"""The runs of the paper's figures: the rows of the tables in docs/paper, and the file of settings of each.

The files are configs/paper/FIGURE/NAME.yaml. What the paper does not print was chosen for them: docs/paper/README.md.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from lab.pages.markdown import ROOT

PAPER, CONFIGS = ROOT / "docs/paper", ROOT / "configs/paper"
CLUSTER_FILE = ROOT / "configs/clusters/dgx-2.yaml"
SEQ_LENGTH = 1024  # of all rows


@dataclass(frozen=True)
class Experiment:
    figure: str
    row: dict[str, str]

    @property
    def name(self) -> str:
        system = "baseline" if self.is_baseline else self.row.get("zero_config") or "zero"
        return f"{self.row['model']}-{system}-{self.row['gpus']}".lower()

    @property
    def is_baseline(self) -> bool:
        return self.row.get("system", "").startswith("Baseline")

    @property
    def num_gpus(self) -> int:
        return int(self.row["gpus"])

    @property
    def measured_tflops(self) -> float | None:
        """The TFLOPs a GPU that the paper prints; None if they are unknown or the run did not fit."""
        value = self.row.get("tflops_per_gpu", "")
        return float(value) if value and value != "OOM" else None

    def tflops(self, seconds: float) -> float:
        """Return TFLOPs a GPU for a step of `seconds`.

        Operations are counted as the authors do: 8 x parameters x tokens.
        """
        parameters = 12 * int(self.row["layers"]) * int(self.row["hidden"]) ** 2
        return 8 * parameters * int(self.row["total_batch"]) * SEQ_LENGTH / self.num_gpus / seconds / 1e12

    def settings(self) -> Settings:
        return parsed(CONFIGS / self.figure / f"{self.name}.yaml", self.num_gpus)


def experiments(figure: str) -> Iterator[Experiment]:
    (table,) = PAPER.glob(f"fig{figure.removeprefix('figure')}_*.csv")
    with table.open() as file:
        for row in csv.DictReader(file):
            yield Experiment(figure, row)


def parsed(config: Path, world_size: int, *options: str) -> Settings:
    """Return the settings of a file for a dry run on the paper's cluster."""
    world = f"--dry_run.world_size={world_size}", f"--dry_run.cluster={CLUSTER_FILE}"
    return parse_settings(["--config", str(config), *world, *options])
