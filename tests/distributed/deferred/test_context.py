"""A GPT whose sequences are divided over context ranks is the same if the exchanges of its heads run late."""

import torch

from parallel.mesh import Mesh
from tests.deferred import run_late
from tests.distributed.gpt.test_tensor_parallel import assert_equals_whole, batch, build, layout_of, train_whole
from tests.distributed.parallel.test_context_parallel import CONFIG, Case, logits_and_traffic, train_case
from zero.partition.config import ZeroConfig


def test_late_exchanges_of_heads_change_nothing():
    results = run_late(2, train_case, Case(1, 2, False, ZeroConfig(2, bucket_numel=2000), "keep"))
    assert_equals_whole(results, train_whole(CONFIG, 1), tensor_size=1)


def test_late_gathers_of_logits_change_nothing():
    whole = build(CONFIG, layout_of(Mesh.create(1).tensor, False)).eval()
    ids = batch(CONFIG, 0, 0, 0)[0][:, :7]
    for logits, _ in run_late(2, logits_and_traffic):
        torch.testing.assert_close(logits, whole(ids), rtol=0, atol=1e-10)
