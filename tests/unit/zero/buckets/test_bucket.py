"""The gradients of one bucket: staged in memory that is not initialized, and added to the sum."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from parallel.memory_kinds import TensorKind
from parallel.mesh import Axis, Work
from zero.chosen import homes_of
from zero.core.buckets.bucket_gradient import BucketGradient
from zero.core.memory.allocators import device_allocator
from zero.core.memory.staging import BufferPool
from zero.core.partition.layout import Ranges
from zero.core.partition.stage import STAGES, GradientTypes, Lifetime
from zero.core.protocols.gradient_sum import scale_into
from zero.core.protocols.transport import Direct
from zero.settings.config import NO_OFFLOAD

CPU, FP32 = torch.device("cpu"), torch.float32


class Alone(Direct):
    """The first of two ranks, whose gradients in fp32 are added twice."""

    def scale(self, dtype: torch.dtype) -> float:
        return 2.0


def bucket_gradient(param: nn.Parameter, lifetime: Lifetime) -> BucketGradient:
    """Make a bucket of a parameter of 3 elements and a gap, of which this rank owns 5."""
    transport = Alone(Axis.trivial("data")).bind(Ranges(range(100, 110), range(100, 105), range(100, 105)))
    policy, types = replace(STAGES[2], owned_grads=lifetime), GradientTypes(FP32, FP32)
    return BucketGradient(
        transport, {param: range(100, 103)}, [range(103, 110)], types, policy, homes_of(NO_OFFLOAD, CPU)
    )


def reduced(grads: BucketGradient, param: nn.Parameter, value: float, pool: BufferPool) -> Tensor:
    """Stage a gradient, and give a part of the message to the sum as if it had been reduced; return what is owned."""
    grads.write(param, torch.full((param.numel(),), value), pool)
    grads.total.add(grads.finish(pool)[:5], 0.5, is_last=False)
    grads.unstage(pool)
    return grads.own


@pytest.mark.parametrize("lifetime", Lifetime)
def test_the_sum_is_that_of_all_reductions_since_it_was_freed(lifetime):
    param = nn.Parameter(torch.zeros(3))
    grads, pool = bucket_gradient(param, lifetime), BufferPool(device_allocator(CPU, TensorKind.BUFFERS), 16, [FP32])
    pool.put_back(pool.take(FP32).fill_(torch.nan), Work())  # it has been used before
    for _ in range(2):
        assert (grads.own.untyped_storage().nbytes() == 0) == (lifetime is Lifetime.TRANSIENT)
        assert reduced(grads, param, 3.0, pool).tolist() == [3, 3, 3, 0, 0]
        assert reduced(grads, param, 4.0, pool).tolist() == [7, 7, 7, 0, 0]
        grads.free()


def test_a_product_of_another_type_is_rounded_once_and_does_not_overflow():
    narrow = scale_into(torch.empty(2, dtype=torch.float16), torch.tensor([160000.0, 1.0]), 1 / 8)
    assert narrow.tolist() == [20000.0, 0.125]
    wide = scale_into(torch.empty(1), torch.tensor([1.0], dtype=torch.bfloat16), 1 / 3)
    assert wide.item() == pytest.approx(1 / 3, rel=1e-6)
