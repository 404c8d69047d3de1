"""An experiment on M_D (section 6.3): a step with and without it in the imitated caching allocator of a GPU."""

from collections.abc import Sequence

from lab.dryrun.dry_run import DEVICE, dry_run
from lab.observe.caching_allocator import CachingAllocator, OutOfMemory
from lab.pages.markdown import table
from lab.paper.experiments import CONFIGS, parsed
from lab.paper.results import Part

CONFIG = "figure4/1.5b-zero-128"
RESOLUTION = 2**23  # bytes


def refusal(storages: Sequence[tuple[int, int]], capacity: float) -> OutOfMemory | None:
    """Return why a step's allocations do not fit a GPU of `capacity` bytes; None if they do."""
    try:
        CachingAllocator(capacity).replay(storages)
    except OutOfMemory as error:
        return error
    return None


def needed_bytes(storages: Sequence[tuple[int, int]]) -> int:
    """Return the least memory of a GPU with which the allocations succeed, to within RESOLUTION."""
    low, high = 0, 2**40
    while high - low > RESOLUTION:
        middle = (low + high) // 2
        low, high = (middle, high) if refusal(storages, middle) else (low, middle)
    return high


def section_6(*options: str) -> Part:
    """Return a step of 1.5B on 128 GPUs that a limit ends without M_D, and not with it."""
    storages, peaks = {}, {}
    for name, defragments in (("with M_D", "true"), ("without", "false")):
        print(f"section6 {name}", flush=True)
        of_both = f"--activations.defragment={defragments}", f"--zero.defragment={defragments}"
        settings = parsed(CONFIGS / f"{CONFIG}.yaml", 128, "--activations.layers_per_checkpoint=1", *of_both, *options)
        recording = dry_run(settings)
        storages[name], peaks[name] = recording.memory.storages, sum(recording.peak[DEVICE].values())
    needed = {name: needed_bytes(one) for name, one in storages.items()}
    limit, rows = sum(needed.values()) / 2, []
    for name, of_run in storages.items():
        error = refusal(of_run, limit)
        ended = (
            f"out of memory: {error.num_bytes / 1e9:.2f} GB, {error.free_bytes / 1e9:.2f} free" if error else "trains"
        )
        share = needed[name] / peaks[name] - 1
        rows.append([name, f"{peaks[name] / 1e9:.2f}", f"{needed[name] / 1e9:.2f}", f"{share:.1%}", ended])
    gained = needed["without"] - needed["with M_D"]
    verdict = "right" if gained > 0 else "not reproduced"
    status = (
        f"{verdict}: 1.5B needs {gained / 1e9:.2f} GB less with M_D; the 30% of the paper's extreme cases do not occur"
    )
    headings = [
        "",
        "tensors at the peak, GB",
        "the allocator needs, GB",
        "lost to fragments",
        f"{limit / 1e9:.2f} GB a GPU",
    ]
    return status, table(headings, rows)
