"""The configurations of the paper's figures: one YAML file of settings for each row of the tables in docs/paper.

python -m lab.paper.experiments        writes configs/paper/figure2/*.yaml and those of the other figures
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAPER, CONFIGS = ROOT / "docs/paper", ROOT / "configs/paper"
CLUSTER_FILE = ROOT / "configs/clusters/dgx-2.yaml"
FOUND = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
FIGURES: dict[str, str] = FOUND["figures"]
ZERO_CONFIGS: dict[str, tuple[int, str]] = {name: tuple(found) for name, found in FOUND["zero_configs"].items()}
GPUS_PER_NODE = 16
LAYERS_PER_CHECKPOINT = 2  # not printed in the paper, but explains the 33 GB of section 6.1
GRADIENT_TYPES = {"accumulate_dtype": "fp16", "reduce_dtype": "fp16"}  # 16, 4 + 12/N and 2 + 14/N bytes a parameter
OF_THE_PAPER = {"seq_length": 1024, "vocab_size": 50257}  # of its models
BUCKET_NUMEL = 2**25  # the size of the constant-size buffers (C_B)


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
        return 8 * parameters * int(self.row["total_batch"]) * 1024 / self.num_gpus / seconds / 1e12

    @property
    def path(self) -> Path:
        return CONFIGS / self.figure / f"{self.name}.yaml"

    def settings(self) -> dict[str, Any]:
        row, tensor_size = self.row, int(self.row["mp"])
        stage, store = self._zero_config(tensor_size)
        # ZeRO does not overlap here, as the paper's times of 120B and more suggest. Of the baselines, Megatron-LM of
        # 2019 reduces all gradients at once, after backward; torch's DDP (Figure 4) reduces them in buckets, during
        # backward.
        is_megatron = self.is_baseline and self.figure == "figure2"
        zero = {
            "stage": stage,
            "bucket_numel": None if is_megatron else BUCKET_NUMEL,
            "overlap": self.is_baseline and not is_megatron,
            "overlap_gather": False,  # section 5.1: parameters are gathered at the end of each step
            **GRADIENT_TYPES,
        }
        parallel: dict[str, Any] = {"tensor_size": tensor_size}
        if tensor_size > GPUS_PER_NODE:
            parallel["tensor_across_nodes"] = True
        return {
            "model": {
                "num_layers": int(row["layers"]),
                "hidden_size": int(row["hidden"]),
                "num_heads": int(row["heads"]),
                **OF_THE_PAPER,
                "vocab_multiple": max(128, tensor_size),
                "attention": "math",
            },
            "data": {"path": "runs/data/openwebtext"},
            "parallel": parallel,
            "zero": zero,
            "activations": {"store": store, "layers_per_checkpoint": 1 if self.is_baseline else LAYERS_PER_CHECKPOINT},
            "train": {
                "micro_batch_size": int(row["batch_per_replica"]),
                "global_batch_size": int(row["total_batch"]),
                "precision": "fp16",
            },
            "run": {"dir": f"runs/paper/{self.figure}/{self.name}"},
        }

    def _zero_config(self, tensor_size: int) -> tuple[int, str]:
        """Return the stage and the activation store.

        If the figure does not name them, the stage is 2 (P_os+g). The store then is "partition" (P_a), "keep" without
        tensor parallelism, and "partition_host" (P_a+cpu) for 170B, as in Figure 8.
        """
        if self.is_baseline:
            return 0, "keep"
        if "zero_config" in self.row:
            return ZERO_CONFIGS[self.row["zero_config"]]
        if self.row["model"] == "170B":
            return ZERO_CONFIGS["C5"]
        return ZERO_CONFIGS["C4" if tensor_size > 1 else "C3"]


def experiments(*figures: str) -> Iterator[Experiment]:
    for figure in figures or FIGURES:
        with (PAPER / FIGURES[figure]).open() as file:
            for row in csv.DictReader(file):
                yield Experiment(figure, row)


def parsed(settings: dict[str, Any], world_size: int) -> Settings:
    """Return the settings of a dry run on the paper's cluster."""
    world = [f"--dry_run.world_size={world_size}", f"--dry_run.cluster={CLUSTER_FILE}"]
    return parse_settings(["--config", yaml.safe_dump(settings, default_flow_style=True), *world])


def main() -> None:
    for experiment in experiments():
        experiment.path.parent.mkdir(parents=True, exist_ok=True)
        title = ", ".join(f"{key} {value}" for key, value in experiment.row.items() if value)
        settings = yaml.safe_dump(experiment.settings(), sort_keys=False)
        experiment.path.write_text(f"# {experiment.figure}: {title}\n{settings}")


if __name__ == "__main__":
    main()
