"""The plan of an acceptance run: its ranks, models and lengths, which follow from the machine."""

import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import yaml

from data.staging import IndexedWriter, token_dtype
from gpt.shape.config import ModelConfig
from gpt.shape.flops import model_flops, peak_flops_per_second
from lab.acceptance.machine import Machine
from lab.measure.cluster import ClusterSpec

HEAD_WIDTH = 64
GIB = 2**30


@dataclass(frozen=True)
class ModelSize:
    """The size of a GPT-2; `millions` is its number of parameters."""

    name: str
    layers: int
    hidden: int
    millions: int

    def options(self, seq: int) -> dict[str, object]:
        return {
            "model.num_layers": self.layers,
            "model.hidden_size": self.hidden,
            "model.num_heads": self.hidden // HEAD_WIDTH,
            "model.seq_length": seq,
        }


@dataclass(frozen=True)
class Scale:
    """The sizes of an acceptance run. A training run is measured up to the first profiled step."""

    compared: tuple[ModelSize, ...]  # beside DDP and FSDP2, from the smallest on; a larger one has to fit
    trained: ModelSize
    seq: int
    vocab: int
    micro_batch_size: int
    rounds: int
    bench_steps: int  # of each contender in a round
    warmup: int
    training_stages: list[int]
    training_steps: int
    log_every: int
    profiled: list[int]
    num_cases: int | None  # that are compared with one process; None: all
    long: dict[str, Any]  # the model of --long, its batch, and other options of pretrain_gpt.py

    @classmethod
    def load(cls, path: Path) -> Self:
        found = yaml.safe_load(path.read_text())
        compared = tuple(ModelSize(**size) for size in found["compared"])
        return cls(**(found | {"compared": compared, "trained": ModelSize(**found["trained"])}))


@dataclass(frozen=True)
class Plan:
    """One acceptance run. All files, but the results of a machine with GPUs, are written to the folder `output`."""

    machine: Machine
    num_ranks: int
    output: Path
    data: str | None = None  # prefix of the user's own tokens, for the long runs

    @property
    def is_judged(self) -> bool:
        """True if times and memory are judged. On CPUs they are recorded only: they say nothing about GPUs."""
        return self.machine.num_gpus > 0

    @cached_property
    def scale(self) -> Scale:
        return Scale.load(Path(__file__).with_name("gpus.yaml" if self.machine.num_gpus else "cpus.yaml"))

    @property
    def world_sizes(self) -> list[int]:
        """The numbers of ranks that are compared with one process."""
        return [size for size in (1, 2, 4, 8) if size <= self.num_ranks] if self.machine.num_gpus else [self.num_ranks]

    @property
    def compared(self) -> list[ModelSize]:
        """The models to compare with DDP and FSDP2: the smallest, and the largest that fits."""
        smallest, *larger = self.scale.compared
        return [smallest, *[size for size in larger if self._all_contenders_fit(size)][-1:]]

    def _all_contenders_fit(self, size: ModelSize) -> bool:
        """Return True if the states of all contenders fit the memory of a GPU side by side, with 16 GiB to spare.

        In bytes a parameter: the template 2, DDP 8, FSDP2 8/N, and stages 1 to 3 6 + 12/N, 2 + 16/N and 18/N.
        """
        return size.millions * 1e6 * (18 + 54 / self.num_ranks) + 16 * GIB < self.machine.gpu_memory_bytes

    @property
    def half_precision(self) -> str:
        """The precision of training runs; half precision needs minutes on CPUs, so it is fp32 there."""
        if not self.machine.num_gpus:
            return "fp32"
        return "bf16" if self.machine.has_bf16 else "fp16"

    @property
    def cluster_file(self) -> Path:
        return self.output / "cluster.yaml"

    @property
    def synthetic_data(self) -> Path:
        return self.output / "data" / "synthetic"

    @cached_property
    def peak(self) -> tuple[float, str]:
        """The peak FLOP/s of a device in half precision and its source: the data sheet or the preflight."""
        dtype = torch.bfloat16 if self.machine.has_bf16 else torch.float16
        if self.machine.num_gpus and (peak := peak_flops_per_second(self.machine.gpu, dtype)):
            return peak, "of the data sheet"
        return ClusterSpec.load(self.cluster_file).peak_half_tflops * 1e12, "measured by the preflight"

    def launch(self, num_ranks: int, *words: str) -> list[str]:
        """Return the command that starts a program, given as words for torchrun, on so many ranks of this machine."""
        options = ["--standalone", f"--nproc-per-node={num_ranks}"]
        return [sys.executable, "-m", "parallel.launch", *options, *words]

    @property
    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, self.machine.num_cores // 16)))}

    def flops_per_device(self, size: ModelSize, num_sequences: int) -> int:
        heads = size.hidden // HEAD_WIDTH
        config = ModelConfig(size.layers, size.hidden, heads, self.scale.seq, self.scale.vocab, dropout=0.0)
        return model_flops(config, num_sequences)

    def write_synthetic_data(self) -> None:
        """Write as many random tokens as the training runs read, low ids more often."""
        self.synthetic_data.parent.mkdir()
        document, scale = 8 * self.scale.seq, self.scale
        num_documents = 2 + 2 * scale.training_steps * scale.micro_batch_size * self.num_ranks * scale.seq // document
        generator = np.random.default_rng(0)
        tokens = (scale.vocab * generator.random(num_documents * document) ** 8).astype(np.int64)
        with IndexedWriter(self.synthetic_data, token_dtype(scale.vocab)) as writer:
            writer.add(tokens, np.full(num_documents, document))
