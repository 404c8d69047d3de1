"""Fake tensors on `cuda:0` with torch's CPU build, in a process of its own.

torch's FakeTensorMode refuses operations on two devices, as a GPU does, and takes the paths of CUDA tensors. It does
not go everywhere; each of `REPLACED` stands for a part that needs a driver, or values.
"""

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

SOURCE = Path(__file__).with_suffix(".cpp")
LIBRARIES = ("libc10.so", "libtorch_cpu.so")
PEAK_BYTES = 950_000


def _random_state() -> Any:
    import torch

    return torch.zeros(16, dtype=torch.uint8)


def _bytes_of_adam(_optimizer: Any, _settings: Any, _device: Any, groups: Any, *_: Any) -> list[float]:
    return [8.0 for _ in groups]


REPLACED: dict[str, dict[str, Any]] = {
    "torch.cuda.current_device": {"return_value": 0},  # asks the driver
    "torch.cuda.get_device_capability": {"return_value": (9, 0)},  # torch.distributed chooses a kernel by it
    "torch.cuda.max_memory_allocated": {"return_value": PEAK_BYTES},  # there is no allocator
    "torch.cuda.reset_peak_memory_stats": {},
    "torch.cuda.get_rng_state": {"side_effect": _random_state},
    "zero.core.optimizer.probe": {"side_effect": _bytes_of_adam},  # updates parameters, and compares values
}


def build_library(folder: Path) -> Path | None:
    """Compile the CUDA device; return its library, or None if there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    torch, library = _folder_of_torch(), folder / "fake_cuda.so"
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch}/include", f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True, capture_output=True)
    return library


def run_on_fake_cuda(library: Path, function: str, cases: list[Any]) -> list[str]:
    """Call `module:function(case)` for each case in a process with a CUDA device; return the error of each, or ""."""
    command = [sys.executable, "-m", "tests.fake_cuda", str(library), function, json.dumps(cases)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=SOURCE.parents[1])
    for line in result.stdout.splitlines():
        if line.startswith("errors: "):
            return json.loads(line.removeprefix("errors: "))
    raise AssertionError(result.stdout + result.stderr)


@contextmanager
def fake_cuda(rank: int, size: int) -> Iterator[None]:
    """Let tensors be fake, with streams that do nothing, as one rank of a world that does not exist."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from lab.races.stream_checker import StreamChecker
    from parallel.world import imitated_world

    streams = StreamChecker(torch.device("cuda", 0))  # it is not entered: nothing is followed
    with ExitStack() as stack:
        stack.enter_context(mock.patch("parallel.streams.active_simulation", return_value=streams))
        for name, options in REPLACED.items():
            stack.enter_context(mock.patch(name, **options))
        stack.enter_context(imitated_world(rank, size, size, "nccl"))
        stack.enter_context(FakeTensorMode())
        yield


def _folder_of_torch() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def _main(library: str, name: str, cases: str) -> None:
    for file in LIBRARIES:
        ctypes.CDLL(str(_folder_of_torch() / "lib" / file), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library)  # before torch asks for a CUDA device
    module, _, function = name.partition(":")
    call = getattr(importlib.import_module(module), function)
    errors = []
    for case in json.loads(cases):
        try:
            call(*case)
            errors.append("")
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [f"{frame.filename}:{frame.lineno}" for frame in frames if "site-packages" not in frame.filename]
            errors.append(f"{type(error).__name__}: {error}; in {', '.join(own[-5:])}")
    sys.stdout.write(f"errors: {json.dumps(errors)}\n")
    sys.stdout.flush()
    os._exit(0)  # autograd's thread of the device would wait for a driver


if __name__ == "__main__":
    _main(*sys.argv[1:])
