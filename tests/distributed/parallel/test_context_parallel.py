"""A GPT whose sequences are divided over context ranks trains as it does whole in one process."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.model.transformer import GPT
from parallel.mesh import Mesh
from tests.distributed.gpt.test_tensor_parallel import (
    Result,
    assert_equals_whole,
    batch,
    build,
    config_of,
    layout_of,
    train,
    train_whole,
)
from tests.ranks import run_cases, run_ranks
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.settings.config import ZeroConfig

CONFIG = config_of(97)


@dataclass(frozen=True)
class Case:
    tensor_size: int
    context_size: int
    is_split: bool
    zero: ZeroConfig
    store: str
    num_micro_batches: int = 1


CASES = [
    Case(1, 4, False, ZeroConfig(3, bucket_numel=2000), "none"),
    Case(1, 2, False, ZeroConfig(2, bucket_numel=2000), "keep", num_micro_batches=2),
    Case(2, 2, True, ZeroConfig(3, bucket_numel=2000), "selective", num_micro_batches=2),
    Case(2, 2, False, ZeroConfig(1), "partition"),
]


def train_case(case: Case) -> Result:
    activations = ActivationsConfig(case.store)
    arguments = CONFIG, case.tensor_size, case.is_split, case.zero, case.num_micro_batches, activations
    return train(*arguments, case.context_size)


def test_context_parallelism_equals_one_process():
    for case, results in zip(CASES, run_cases(4, train_case, [[case] for case in CASES]), strict=True):
        num_batch_ranks = 4 // case.tensor_size // case.context_size
        assert_equals_whole(results, train_whole(CONFIG, num_batch_ranks, case.num_micro_batches), case.tensor_size)


def logits_and_traffic() -> tuple[Tensor, Counter]:
    """Return the logits of sequences that no number of ranks divides, and the bytes of a forward without them."""
    mesh = Mesh.create(tensor_size=1, context_size=2)
    gpt: GPT = build(CONFIG, layout_of(mesh.tensor, False, mesh.context))
    gpt.eval()
    ids = batch(CONFIG, 0, 0, 0)[0]
    with torch.no_grad():
        logits = gpt(ids[:, :7])
        mesh.log.clear()
        gpt(ids, ids)
    return logits, Counter({op: sent for (_, op, _), sent in mesh.log.wire_bytes_by.items()})


def test_every_context_rank_gets_the_logits_of_whole_sequences():
    whole = build(CONFIG, layout_of(Mesh.create(1).tensor, False)).eval()
    ids = batch(CONFIG, 0, 0, 0)[0]
    for logits, sent in run_ranks(2, logits_and_traffic):
        torch.testing.assert_close(logits, whole(ids[:, :7]), rtol=0, atol=1e-10)
        # Half of q, k, v and the output of the own stretch, in each of two blocks.
        assert sent == {"all_to_all": 2 * 4 * ids.numel() // 2 * 32 // 2 * 8}
