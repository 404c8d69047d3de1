"""What is measured of training steps: speed, traffic and memory."""

import resource
import time
from dataclasses import asdict

import torch

from gpt.model.flops import hardware_flops, model_flops
from gpt.model.transformer import ModelConfig
from parallel.blocks import Recomputation
from parallel.instruments.comm_log import CommLog
from zero.engine import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.state.resident import buffer_bytes, resident_states


class Throughput:
    """Tokens and FLOPs per second over the steps since the last `measure`."""

    def __init__(self, model: ModelConfig, num_devices: int, recomputes: Recomputation, peak_flops: float | None):
        self._model, self._num_devices, self._recomputes = model, num_devices, recomputes
        self._peak_flops = peak_flops
        self._num_sequences, self._start = 0, time.perf_counter()

    def count(self, num_sequences: int) -> None:
        self._num_sequences += num_sequences

    def restart(self) -> None:
        """Begin a new stretch, without what was counted or done since the last measurement."""
        self._num_sequences, self._start = 0, time.perf_counter()

    def measure(self) -> dict[str, float | None]:
        """Call when the device has finished the counted steps."""
        seconds = time.perf_counter() - self._start
        num_sequences, per_device = self._num_sequences, seconds * self._num_devices
        useful = model_flops(self._model, num_sequences) / per_device
        executed = hardware_flops(self._model, num_sequences, self._recomputes) / per_device
        self.restart()
        return {
            "tokens_per_second": num_sequences * self._model.seq_length / seconds,
            "model_tflops_per_device": useful / 1e12,
            "hardware_tflops_per_device": executed / 1e12,
            "mfu": useful / self._peak_flops if self._peak_flops else None,
        }


class StepTraffic:
    """Bytes that this rank sends in one step, along each axis."""

    def __init__(self, log: CommLog):
        self._log = log
        self._before = self._sent()

    def measure(self) -> dict[str, int]:
        return {name: sent - self._before[name] for name, sent in self._sent().items()}

    def _sent(self) -> dict[str, int]:
        """The data axis with its parts, where sharding is hierarchical."""
        data = sum(self._log.wire_bytes(axis) for axis in ("data", "shard", "replica"))
        return {"data_axis_bytes": data, "tensor_axis_bytes": self._log.wire_bytes("tensor")}


def memory_by_kind(model: ZeroDataParallel, optimizer: ZeroOptimizer) -> dict[str, int]:
    """Bytes that this rank keeps between steps."""
    states = asdict(resident_states(model, optimizer)) | {"buffers": sum(buffer_bytes(model, optimizer).values())}
    return {f"memory/{kind}_bytes": num_bytes for kind, num_bytes in states.items()}


def peak_memory(device: torch.device) -> dict[str, int]:
    """Since the start: of torch's allocator on a GPU; of the whole process, resident, on a CPU, which has no such.

    Reserved less allocated now is what fragmentation and caching hold; an allocation is tried again after the cache has
    been emptied.
    """
    if device.type != "cuda":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "peak_allocated_bytes": resident,
            "peak_reserved_bytes": resident,
            "reserved_unused_bytes": 0,
            "allocation_retries": 0,
        }
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "reserved_unused_bytes": torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device),
        "allocation_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }
