"""The cluster that a projection is made for: rates of its devices and links, and the fractions that programs reach."""

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Self

import yaml

from parallel.errors import ConfigError


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster, loaded from a YAML file of these fields.

    Rates are in 1e9 bytes per second in each direction, and those of one GPU unless stated otherwise. A `*_fraction` is
    the part of a peak rate that real programs reach; it may be calibrated.
    """

    name: str
    gpus_per_node: int
    gpu_memory_gib: float
    host_memory_gb: float  # of a node
    peak_half_tflops: float  # with tensor cores
    num_multiprocessors: int
    memory_gb_per_second: float
    intra_node_gb_per_second: float
    node_gb_per_second: float  # from one whole node to the others
    network_card_gb_per_second: float  # of one network card
    host_gb_per_second: float  # between the GPU and host memory
    host_memory_gb_per_second: float = 200.0  # between the processors of a node and its memory
    gemm_fraction: float = 1.0
    memory_fraction: float = 1.0
    node_fraction: float = 1.0
    kernel_seconds: float = 5e-6  # the shortest time of a kernel
    hop_seconds: float = 1e-5  # latency of one step of a ring

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ConfigError(
                    f"cluster {self.name}: {field.name}={value} is not a number above 0; correct the file"
                )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a cluster file.

        Raises ConfigError if it cannot be read, or if a field is missing, unknown or not a positive number.
        """
        try:
            values: Any = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(
                f"cluster file {path} cannot be read: {' '.join(str(error).split())}; give another"
            ) from error
        if not isinstance(values, dict):
            values = {}
        known = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        if missing := sorted(required - set(values)):
            raise ConfigError(
                f"cluster file {path} lacks {', '.join(missing)}; see configs/clusters/dgx-2.yaml for all fields"
            )
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"cluster file {path} has {', '.join(unknown)}, which is unknown; remove it")
        return cls(**values)

    @property
    def host_memory_rate_of_a_gpu(self) -> float:
        """One rank's share of `host_memory_gb_per_second`, in 1e9 bytes per second."""
        return self.host_memory_gb_per_second / self.gpus_per_node

    @property
    def gpu_memory_bytes(self) -> int:
        return int(self.gpu_memory_gib * 2**30)
