"""A rank's process gets the threads, cores and options that torchrun leaves unset, and keeps what the user has set."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config as inductor

from parallel import process_defaults as defaults
from parallel.validation.errors import ConfigError, NodeError
from parallel.world import PRINT_SECONDS, StartOptions, exit_with_error, start_world
from tests.programs import ROOT, run_python

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_launches_are_ordered_only_if_asked_and_nccls_record_goes_to_the_run_unless_the_user_has_set_them():
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/mine_"}
    of_run = "/runs/1/nccl_trace_rank_"
    for orders_launches, given, expected in [
        (False, {}, ("32", of_run)),
        (True, {}, ("1", of_run)),
        (True, own, ("8", None)),
    ]:
        environment = dict(given)
        defaults.set_variables(environment, orders_launches, Path("/runs/1"))
        names = "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_FR_DUMP_TEMP_FILE"
        assert tuple(map(environment.get, names)) == expected
        assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in environment
        assert "CUBLAS_WORKSPACE_CONFIG" not in environment
        defaults.set_variables(environment, False, None, fixes_kernels=True)
        assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_process_may_open_as_many_files_as_its_hard_limit_allows():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
    start_world(StartOptions(device="cpu"))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("device", "given", "expected"), [(CPU, {}, "1"), (CPU, {"THP_MEM_ALLOC_ENABLE": "0"}, "0"), (GPU, {}, None)]
)
def test_tensors_of_a_cpu_lie_in_large_pages_unless_the_user_has_set_it(device, given, expected):
    environment = dict(given)
    defaults.use_large_pages(environment, device)
    assert environment.get("THP_MEM_ALLOC_ENABLE") == expected


def test_the_ranks_of_a_node_share_its_cores_for_compilers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(defaults, "_own_cores", lambda: set(range(12)))
    monkeypatch.setattr(inductor, "compile_threads", 32)
    own = {"OMP_NUM_THREADS": "3"}  # of the user: the threads of this process stay
    of_torchrun = own | {"TORCHELASTIC_RUN_ID": "a"}
    for size, given, expected in (
        (1, of_torchrun, 32),
        (8, of_torchrun | {"TORCHINDUCTOR_COMPILE_THREADS": "9"}, 32),
        (5, of_torchrun, 2),
        (99, of_torchrun, 1),
        (8, own, 12),  # each rank of Slurm has cores of its own
    ):
        defaults.share_cores(dict(given), size, CPU)
        assert inductor.compile_threads == expected


PINNED, SEGMENTS = "pinned_max_round_threshold_mb:1", "expandable_segments:True"


@pytest.mark.parametrize(
    ("environment", "options"),  # the last ones are accepted
    [
        ({}, [f"{SEGMENTS},{PINNED}"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, [f"expandable_segments:False,{PINNED}"]),
        ({"PYTORCH_ALLOC_CONF": f"x:64,{PINNED}", "PYTORCH_CUDA_ALLOC_CONF": "x"}, [f"x:64,{PINNED},{SEGMENTS}"]),
        ({"PYTORCH_ALLOC_CONF": "x:1"}, [f"x:1,{SEGMENTS},{PINNED}", f"x:1,{SEGMENTS}"]),
    ],
)
def test_options_of_the_allocators_are_added_to_the_users_own(monkeypatch, environment, options):
    given: list[str] = []
    monkeypatch.setattr(defaults, "set_allocator", lambda chosen: given.append(chosen) or chosen == options[-1])
    defaults.set_variables(environment, False, None)
    assert given == options


PROGRAM = """
import os, sys, torch
os.sched_getaffinity, os.cpu_count = lambda process: set(range(8)), lambda: 8
from parallel.world import start_world
start_world()
# In one piece: the ranks share a pipe.
sys.stdout.write(f"threads {torch.get_num_threads()} {os.environ['OMP_NUM_THREADS']}\\n")
torch.distributed.barrier()  # no rank ends while the other one still connects to it
sys.exit(7 * torch.distributed.get_rank())
"""


@pytest.mark.full
def test_torchruns_single_thread_becomes_a_ranks_part_of_the_cores_and_the_code_of_a_rank_that_of_the_job(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = "-m", "parallel.launch", "--standalone", "--nproc-per-node=2", str(tmp_path / "program.py")
    ended = run_python(*words, PYTHONPATH=str(ROOT), OMP_NUM_THREADS=None)
    assert ended.stdout.count("threads 4 4") == 2, ended.stderr
    assert ended.returncode == 7


@pytest.fixture
def chosen(monkeypatch) -> list[int]:
    """The numbers of threads that are chosen on a node of 8 cores."""
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    return chosen


def test_a_number_of_threads_that_the_user_has_chosen_stays(monkeypatch, chosen):
    rank = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
    for environment, of_parent in [
        (rank, b"PATH=/bin\0OMP_NUM_THREADS=1\0"),
        (rank, b"OMP_NUM_THREADS=1\0"),
        (rank, None),
        (rank | {"OMP_NUM_THREADS": "3"}, b"PATH=/bin\0"),
        ({"OMP_NUM_THREADS": "1"}, b"PATH=/bin\0"),
    ]:
        monkeypatch.setattr(defaults, "_environment_of_parent", lambda found=of_parent: found)
        defaults.share_cores(dict(environment), 2, CPU)
        assert chosen == []
    monkeypatch.setattr(defaults, "_environment_of_parent", lambda: b"MY_OMP_NUM_THREADS=1\0")
    defaults.share_cores(rank, 2, CPU)
    assert chosen == [4]
    assert rank["OMP_NUM_THREADS"] == "4", "for libraries that are loaded later"


def test_ranks_share_the_cores_of_torchrun_and_keep_those_that_a_scheduler_gave_each(monkeypatch, chosen):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    by_torchrun = {"TORCHELASTIC_RUN_ID": "none"}
    for cores, environment in ((8, by_torchrun), (8, {}), (16, {}), (2, by_torchrun)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        defaults.share_cores(dict(environment), 4, CPU)
    assert chosen == [2, 8, 4, 1]


def test_a_rank_whose_bits_must_not_depend_on_the_number_of_ranks_has_one_thread(chosen):
    for local_size in (1, 4):
        defaults.share_cores({}, local_size, CPU, fixed_threads=True)
    assert chosen == [1, 1]


@pytest.fixture
def sysfs(tmp_path) -> Path:
    nodes = {"0000:0f:00.0": "1", "0000:10:00.0": "-1", "0000:11:00.0": "7", "0000:12:00.0": "0"}
    for address, node in nodes.items():
        (tmp_path / "bus/pci/devices" / address).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / address / "numa_node").write_text(f"{node}\n")
    for number, cores in enumerate(("0-1", "4-6,9")):
        (tmp_path / f"devices/system/node/node{number}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{number}/cpulist").write_text(f"{cores}\n")
    return tmp_path


def test_cores_near_a_gpu_are_read_from_sysfs_or_unknown(sysfs):
    assert defaults.cores_near("0000:0f:00.0", sysfs) == {4, 5, 6, 9}
    assert defaults.cores_near("0000:12:00.0", sysfs) == {0, 1}
    for unknown in ("0000:10:00.0", "0000:11:00.0", "0000:99:00.0"):
        assert defaults.cores_near(unknown, sysfs) == set()


@pytest.mark.parametrize(("allowed", "bound"), [(range(16), {4, 5, 6, 9}), (range(6), {4, 5}), (range(4), None)])
def test_a_rank_runs_on_the_cores_near_its_gpu_among_those_that_it_may_use(sysfs, monkeypatch, allowed, bound):
    found = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: found.update(bound=cores))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: found.update(num_threads=number))
    address = SimpleNamespace(pci_domain_id=0, pci_bus_id=15, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: address)
    cores_near = defaults.cores_near
    monkeypatch.setattr(defaults, "cores_near", lambda address: cores_near(address, sysfs))
    defaults.share_cores({}, 1, GPU)
    assert found == ({"bound": bound, "num_threads": len(bound)} if bound else {})


@pytest.fixture
def gpus(tmp_path, monkeypatch) -> Path:
    """A node of two GPUs, of which torch sees none."""
    for name in ("0000:0f:00.0", "0000:10:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("parallel.world.num_gpus_of_node", lambda: defaults.num_gpus_of_node(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_node_with_gpus_trains_on_its_cpu_only_if_asked(gpus, monkeypatch, is_hidden):
    if is_hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    with pytest.raises(ConfigError, match=r"can use none of the node's 2 GPUs; .* StartOptions\.device=cpu"):
        start_world()
    assert start_world(StartOptions(device="cpu")).device == CPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert start_world().device == CPU
    assert defaults.num_gpus_of_node(gpus / "no driver") == 0


@pytest.mark.parametrize(("rank", "local_rank", "is_printed"), [(8, 0, True), (9, 1, False)])
def test_the_first_rank_of_a_node_prints_what_is_wrong_with_the_node(monkeypatch, capsys, rank, local_rank, is_printed):
    """Rank 0 is on another node, which may be in order."""
    codes, pauses = [], []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr("parallel.world.time.sleep", pauses.append)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "16")
    exit_with_error(NodeError("n2: no GPU can be used"))
    assert capsys.readouterr().err == "error: n2: no GPU can be used\n" * is_printed
    exit_with_error(ConfigError("a setting that all nodes have"))
    assert capsys.readouterr().err == ""
    assert codes == [2, 2]
    assert pauses == [PRINT_SECONDS] * (1 if is_printed else 2), "a rank that prints nothing gives the other one time"


@pytest.mark.parametrize(
    ("num_visible", "local_rank", "local_size", "index"),
    [(8, 3, 8, 3), (1, 3, 8, 0), (8, 1, 2, 1), (4, 3, 8, None), (2, 1, 3, None)],
)
def test_a_rank_that_sees_one_gpu_uses_it_whatever_its_number(monkeypatch, num_visible, local_rank, local_size, index):
    """Slurm's --gpus-per-task=1 shows each rank its own GPU."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr("parallel.world.share_cores", lambda *_: None)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_size))
    if index is None:
        with pytest.raises(ConfigError, match=f"{local_size} ranks were started on a node of {num_visible} GPUs"):
            start_world()
    else:
        assert start_world().device == torch.device("cuda", index)
        assert current == [torch.device("cuda", index)]
    assert start_world(StartOptions(device="cpu")).device == CPU
