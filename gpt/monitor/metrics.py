"""Measurements of training steps: speed, traffic and memory."""

import resource
import time
from dataclasses import asdict

import torch

from gpt.settings.training import TrainSettings
from gpt.shape.config import ModelConfig
from gpt.shape.flops import hardware_flops, model_flops, peak_flops_per_second
from parallel.comm_log import CommLog
from parallel.memory_kinds import highest_peaks
from parallel.tensor.blocks import Recomputation
from zero.checkpoint.resident import buffer_bytes, resident_states
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer


class Throughput:
    """A measurement of tokens and FLOPs per second, over the steps since the last `measure` or `restart`.

    `layout` has the number of ranks, and whatever else is reported beside the speed.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokens_per_sample: float,
        layout: dict[str, int],
        recomputes: Recomputation,
        peak_flops: float | None,
    ):
        self._model, self._layout, self._recomputes = model, layout, recomputes
        self._tokens_per_sample = tokens_per_sample
        self._peak_flops = peak_flops
        self.restart()

    def count(self, num_sequences: int) -> None:
        """Add a step of `num_sequences` sequences to the measurement."""
        self._num_sequences += num_sequences
        self._num_steps += 1

    def restart(self) -> None:
        """Discard what was counted since the last measurement, and begin a new one."""
        self._num_sequences, self._num_steps, self._start = 0, 0, time.perf_counter()

    def measure(self) -> dict[str, float | None]:
        """Return the speed over the counted steps, and begin a new measurement.

        Call it when the device has finished these steps.
        """
        seconds = time.perf_counter() - self._start
        num_sequences, per_device = self._num_sequences, seconds * self._layout["ranks"]
        useful = model_flops(self._model, num_sequences) / per_device
        executed = hardware_flops(self._model, num_sequences, self._recomputes) / per_device
        num_steps = self._num_steps
        self.restart()
        return self._layout | {
            "seconds_per_step": seconds / num_steps,
            "tokens_per_second": num_sequences * self._tokens_per_sample / seconds,
            "model_tflops_per_device": useful / 1e12,
            "hardware_tflops_per_device": executed / 1e12,
            "mfu": useful / self._peak_flops if self._peak_flops else None,
        }


def sent_bytes(log: CommLog) -> dict[str, int]:
    """Return the bytes that this rank has sent along each axis since the log was cleared."""
    # With hierarchical sharding, most collectives run along the two parts of the data axis, shard and replica.
    data = sum(log.wire_bytes(axis) for axis in ("data", "shard", "replica"))
    return {"data_axis_bytes": data, "tensor_axis_bytes": log.wire_bytes("tensor")}


def memory_by_kind(model: ZeroDataParallel, optimizer: ZeroOptimizer) -> dict[str, int]:
    """Return the bytes that this rank keeps between steps, by kind of state."""
    states = asdict(resident_states(model, optimizer)) | {"buffers": sum(buffer_bytes(model, optimizer).values())}
    return {f"memory/{kind}_bytes": num_bytes for kind, num_bytes in states.items()}


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the peak memory since the start: of torch's allocator on a GPU, of the whole process on a CPU.

    `reserved_unused_bytes` is memory that torch's allocator has reserved and not allocated, because of caching or
    fragmentation. `allocation_retries` counts allocations that succeeded only after the cache was emptied.
    """
    if device.type != "cuda":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "peak_allocated_bytes": resident,
            "peak_reserved_bytes": resident,
            "reserved_unused_bytes": 0,
            "allocation_retries": 0,
        }
    allocated, reserved = highest_peaks(device)
    return {
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": reserved,
        "reserved_unused_bytes": torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device),
        "allocation_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }


def peak_flops(train: TrainSettings, device: torch.device) -> float | None:
    """Return the peak FLOP/s of the device in the precision of the run, or None if it is not known."""
    if train.peak_tflops is not None:
        return train.peak_tflops * 1e12
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return peak_flops_per_second(name, train.dtype)
