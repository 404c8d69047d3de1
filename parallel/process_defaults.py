"""Sets what plain `torchrun` leaves unset in the process of a rank, before CUDA and NCCL start; the user's values stay.

threads     Torchrun gives each rank one thread. A rank gets its part of the cores, also if it has a GPU: the CPU
            updates offloaded states, and copies batches and checkpoints.
cores       Those of the NUMA node of the rank's GPU, if sysfs names it: other cores reach the GPU and its pinned memory
            through the link between the processors.
memory      Segments that grow leave fewer gaps between tensors of different sizes. Torch rounds pinned memory up to a
            power of two; from `EXACT_PINNED_MB` on, it gets the size that is asked for (torch 2.13 can, 2.11 cannot).
pages       On a CPU, torch asks for pages of 2 MB instead of 4 KB for tensors of at least that size. The logits of a
            micro-batch are freed and allocated again in each, and their memory would fault page by page.
launches    With one queue from the host to the device, kernels and collectives start in the order of their launch. Else
            there are 32: with 8, more streams than these would wait for each other.
compilers   The ranks of a node share its cores for the processes that compile: inductor starts up to 32 of each rank.
files       As many may be open as the hard limit allows: the store has three connections of each rank.
NCCL        Torch writes its record of the last collectives, by the flight recorder, to the folder of the run.
"""

import os
import resource
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

import torch

from parallel.torch_internals import set_allocator, set_compile_threads

EXACT_PINNED_MB = 1
ALLOCATOR = {"expandable_segments": "True", "pinned_max_round_threshold_mb": str(EXACT_PINNED_MB)}
# Two names of each: the newer one wins in torch, so it is set only if the user has set neither.
ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
FLIGHT_RECORDER_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
FLIGHT_RECORD = "nccl_trace_rank_"  # followed by the rank, as torch's analyzer `torchfrtrace` expects it

COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"
SYSFS, GPUS_OF_NODE = Path("/sys"), Path("/proc/driver/nvidia/gpus")


def set_variables(
    environment: MutableMapping[str, str],
    orders_launches: bool,
    record_folder: Path | None,
    fixes_kernels: bool = False,
) -> None:
    """Set the environment variables of CUDA and NCCL, and the options of torch's allocators, before CUDA starts.

    `orders_launches`: for tensor parallelism, whose collectives are between kernels that wait for them.
    `fixes_kernels`: let cuBLAS use workspaces of one size, with which its kernels are deterministic.
    """
    if fixes_kernels:
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1" if orders_launches else "32")
    if record_folder is not None and not any(name in environment for name in FLIGHT_RECORDER_NAMES):
        environment[FLIGHT_RECORDER_NAMES[0]] = str(record_folder / FLIGHT_RECORD)
    own = next((environment[name] for name in ALLOCATOR_NAMES if name in environment), "")
    missing = [f"{key}:{value}" for key, value in ALLOCATOR.items() if key not in own]
    # A torch that does not know the last option refuses all of them.
    for number in range(len(missing), 0, -1):
        if set_allocator(",".join(filter(None, [own, *missing[:number]]))):
            return


def raise_file_limit() -> None:
    """Let this process, and those that it starts, open as many files as the hard limit allows."""
    hard = max_open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_open_files() -> int:
    """Return the hard limit of the number of files that a process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def use_large_pages(environment: MutableMapping[str, str], device: torch.device) -> None:
    """Let torch's allocator of the CPU use large pages. It reads the variable when it first allocates."""
    if device.type == "cpu":
        environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def share_cores(
    environment: MutableMapping[str, str], local_size: int, device: torch.device, fixed_threads: bool = False
) -> None:
    """Run this rank on the cores near its GPU, with its part of the node's cores as the number of threads.

    `fixed_threads`: one thread on a CPU, however many ranks there are, since kernels add in an order of their threads.
    """
    cores = _own_cores()
    near = _cores_near_gpu(device) & cores if device.type == "cuda" else set()
    # The ranks that torchrun starts share the cores that it may use; those of Slurm may each have cores of their own.
    are_shared = "TORCHELASTIC_RUN_ID" in environment or len(cores) == os.cpu_count()
    num_own = max(1, len(cores) // (local_size if are_shared else 1))
    if local_size > 1 and COMPILERS not in environment:
        environment[COMPILERS] = str(num_own)
        set_compile_threads(num_own)
    if near:
        os.sched_setaffinity(0, near)
    if "OMP_NUM_THREADS" in environment and not _is_of_torchrun(environment, _environment_of_parent()):
        return
    num_threads = min(num_own, len(near or cores))
    is_fixed = fixed_threads and device.type == "cpu"
    if is_fixed:
        num_threads = 1
    if local_size > 1 or near or is_fixed:
        environment["OMP_NUM_THREADS"] = str(num_threads)  # for libraries that are loaded later, and child processes
        torch.set_num_threads(num_threads)


def _own_cores() -> set[int]:
    """Return the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _is_of_torchrun(environment: Mapping[str, str], of_parent: bytes | None) -> bool:
    """Return whether torchrun has set OMP_NUM_THREADS, and not the user. `of_parent`: the variables it started with.

    torchrun sets 1, and only if the variable is unset. What it sets is not among the variables that it started with.
    """
    is_its_value = "TORCHELASTIC_RUN_ID" in environment and environment["OMP_NUM_THREADS"] == "1"
    return is_its_value and of_parent is not None and b"\0OMP_NUM_THREADS=" not in b"\0" + of_parent


def _environment_of_parent() -> bytes | None:
    """Return the variables with which the parent process was started, each ended by a zero; None if they are hidden."""
    try:
        return Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return None


def _cores_near_gpu(device: torch.device) -> set[int]:
    properties = torch.cuda.get_device_properties(device)
    address = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id  # type: ignore[attr-defined]
    return cores_near("{:04x}:{:02x}:{:02x}.0".format(*address))


def cores_near(pci_address: str, sysfs: Path = SYSFS) -> set[int]:
    """Return the cores of the NUMA node to which a PCI device is attached; none if the system does not say."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text())
        text = (sysfs / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
    except (OSError, ValueError):
        return set()
    return set(_numbers(text.strip().split(",") if text.strip() else []))


def _numbers(ranges: Iterable[str]) -> Iterable[int]:
    """Yield the numbers of ranges such as "0-3" and "7"."""
    for text in ranges:
        first, _, last = text.partition("-")
        yield from range(int(first), int(last or first) + 1)


def num_gpus_of_node(folder: Path = GPUS_OF_NODE) -> int:
    """Return the number of GPUs that NVIDIA's driver has found in this node, also if the process may not use them."""
    return len(list(folder.iterdir())) if folder.is_dir() else 0
