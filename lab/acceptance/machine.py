"""The machine that an acceptance run is made on."""

import os
import platform
import subprocess
from dataclasses import dataclass

import torch

from parallel.validation.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """The GPUs, none of which this process uses itself, and the versions. Without GPUs, `gpu` describes the CPU."""

    num_gpus: int
    gpu: str
    gpu_memory_bytes: int
    driver: str
    has_bf16: bool
    num_cores: int
    python: str
    torch: str
    cuda: str
    nccl: str

    @property
    def slug(self) -> str:
        """The name of the GPU as part of a file name."""
        words = "".join(c if c.isalnum() else " " for c in self.gpu.lower()).split()
        return "-".join(word for word in words if word != "nvidia")


def find_machine() -> Machine:
    """Return the facts of this machine. The GPUs are asked by nvidia-smi, which allocates no memory on them."""
    num_gpus = torch.cuda.device_count()
    has_nccl = torch.distributed.is_nccl_available()
    name, memory_mib, driver, capability = _ask_nvidia_smi() if num_gpus else ("CPU", "0", "-", "8.0")
    return Machine(
        num_gpus=num_gpus,
        gpu=name,
        gpu_memory_bytes=int(memory_mib) * 2**20 if memory_mib.isdigit() else 0,  # [N/A] if it is the host's
        driver=driver,
        has_bf16=float(capability) >= 8,
        num_cores=os.cpu_count() or 1,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda or "-",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl and num_gpus else "-",
    )


def _ask_nvidia_smi() -> list[str]:
    """Return (name, memory in MiB, version of the driver, compute capability) of the first GPU.

    Raises ConfigError if nvidia-smi does not run.
    """
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"nvidia-smi does not run on a machine with GPUs: {error}; repair the driver") from error
    return [field.strip() for field in lines[0].split(",")]
