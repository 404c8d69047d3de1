"""The paths of CUDA: building, steps, offload and what a save copies, on fake tensors of `cuda:0`.

A dry run has tensors on the CPU, so it takes none of these paths. Where fake tensors do not go:

- flash attention: the choice of its kernel calls CUDA's; the explicit matrices of scores are used
- inductor and the compiled loss, NCCL, pinned memory: there is no driver, and no process to communicate with
- buckets that Gemini moves to the device: a fake tensor keeps its device if its `.data` is set
- the values that a checkpoint's file, the comparison of replicas and an optimizer without a fused step read
"""

import pytest
import torch

from gpt.builder.train_state import TrainState, build_model
from gpt.checkpoint.checkpoint import rank_state
from gpt.model.transformer import initialize
from gpt.shape.config import ModelConfig
from gpt.train_step import train_step
from parallel.mesh import Mesh
from parallel.tensor.token_layout import ReplicatedTokens, SplitTokens
from parallel.torch_internals import real_tensors
from tests.fake_cuda import build_library, fake_cuda, run_on_fake_cuda
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.checkpoint.writer import HostCopies
from zero.core.step.loss_scale import LossScale
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import OffloadConfig, ZeroConfig

CONFIG = ModelConfig(2, 32, 4, 16, 97, dropout=0.1, vocab_multiple=8, attention="math")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CHUNK = 3000 / 2**20


def train(stage: int, offload: str, store: str, precision: str, tensor_size: int, shard_size: int | None) -> None:
    """Run three steps as one of four ranks, and copy what a save would write."""
    cuda, dtype = torch.device("cuda", 0), DTYPES[precision]
    # Of the megabyte, 50 kB are free: some shards are kept on the device, and no bucket is moved there.
    config = OffloadConfig(offload, accelerator_memory_gb=1e-3 if offload == "auto" else None, hidden_dim=32,
                           min_chunk_size_m=CHUNK, search_range_m=CHUNK)  # fmt: skip
    with fake_cuda(rank=1, size=4):
        with real_tensors():  # torch reads the ranks of a mesh from a tensor
            mesh = Mesh.create(tensor_size, shard_size=shard_size, imitated_backend="nccl")
        tokens = (ReplicatedTokens if "partition" in store else SplitTokens)(mesh.tensor)
        activations = ActivationsConfig(store, defragment=stage % 2 == 0)
        gpt = build_model(CONFIG, activations, tokens, cuda, dtype)
        initialize(gpt, seed=0)
        zero = ZeroConfig(stage, 3000, overlap_gather=True, accumulate="local" if stage == 3 else "reduce")
        model = ZeroDataParallel(gpt, mesh.data, zero, offload=config)
        scale = LossScale(2.0**8, is_dynamic=precision == "fp16")  # the optimizer moves it to the device
        settings = {"tensor": mesh.tensor, "clip_norm": 1.0, "loss_scale": scale, "fused": True}
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, **settings)
        batches = [torch.zeros((2, CONFIG.seq_length + 1), dtype=torch.int64, device=cuda) for _ in range(2)]
        for _ in range(2 if config.mode != "auto" else 3):  # the planner records two
            loss, norm = train_step(model, optimizer, batches, mesh)
            assert loss.device == norm.device == cuda
        assert_placed(optimizer, cuda)
        with model.gathered() as module:
            assert all(param.device == cuda for param in module.parameters())
        tensors = rank_state(TrainState(mesh, model, optimizer, cuda, activations)).tensors()
        fake = {name: tensor for name, tensor in tensors.items() if not name.startswith("random.")}
        copies = HostCopies(cuda).take(fake)
        assert {copy.device.type for copy in copies.values()} == {"cpu"}


def assert_placed(optimizer: ZeroOptimizer, cuda: torch.device) -> None:
    for bucket in optimizer.buckets:
        expected = torch.device("cpu") if bucket.home.is_apart else cuda
        states = [optimizer.states_of(piece) for piece in optimizer.pieces_of(bucket)]
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        assert {tensor.device for tensor in (bucket.master, bucket.grads.own, *moments)} == {expected}
        on_host = bucket.params.home.is_apart
        assert bucket.params.own.device == (torch.device("cpu") if on_host else cuda)


FEW = [(3, "host", "partition_host", "bf16", 2, None)]
OTHERS = [
    (0, "accelerator", "none", "fp32", 1, None),
    (0, "host", "partition_host", "bf16", 2, None),
    (1, "accelerator", "none", "bf16", 1, 2),
    (1, "host", "selective", "fp16", 2, None),
    (2, "accelerator", "keep", "bf16", 1, 2),
    (2, "host", "partition", "fp16", 2, None),
    (3, "accelerator", "none", "bf16", 2, None),
    (3, "auto", "keep", "bf16", 1, 2),
]


@pytest.mark.parametrize("cases", [FEW, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["few", "others"])
def test_building_steps_offload_and_the_copies_of_a_save_keep_devices_apart(tmp_path, cases):
    if (library := build_library(tmp_path)) is None:
        pytest.skip("there is no g++ to compile the CUDA device for fake tensors")
    errors = run_on_fake_cuda(library, f"{__name__}:train", cases)
    assert dict(zip(cases, errors, strict=True)) == dict.fromkeys(cases, "")
