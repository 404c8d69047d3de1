"""Flips of one bit of a model state, as by a machine that computes or remembers wrong.

gradient    the reduced gradient, after backward and before the update
weight      a parameter of which the rank has all elements, before forward
master      a master weight that the rank owns, before forward
moment      Adam's second moment of such a weight, before forward
"""

import random
import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor

from zero.core.buckets.bucket import Bucket
from zero.core.partition.stage import Lifetime
from zero.data_parallel import ZeroDataParallel
from zero.extensions.hashes import INTEGERS
from zero.optimizer import ZeroOptimizer

Named = Iterator[tuple[str, Tensor]]


def owned(model: ZeroDataParallel, buffer_of: Callable[[Bucket], Tensor]) -> Named:
    for flat in model.flats:
        for bucket in flat.buckets:
            for span, part in flat.layout.spans_in(bucket.ranges.own):
                yield span.name, bucket.owned_part(buffer_of(bucket), part)


def weights(model: ZeroDataParallel, optimizer: ZeroOptimizer) -> Named:
    for flat in model.flats:
        if flat.lifetime is Lifetime.PERSISTENT:
            for span in flat.layout.spans:
                yield span.name, flat.full[span.elements.start : span.elements.stop]


def moments(model: ZeroDataParallel, optimizer: ZeroOptimizer) -> Named:
    for flat in model.flats:
        for bucket in flat.buckets:
            for piece in optimizer.pieces_of(bucket):
                yield piece.name, optimizer.states_of(piece)["exp_avg_sq"].view(-1)


TARGETS: dict[str, Callable[[ZeroDataParallel, ZeroOptimizer], Named]] = {
    "gradient": lambda model, _: owned(model, lambda bucket: bucket.grads.own),
    "weight": weights,
    "master": lambda model, _: owned(model, lambda bucket: bucket.master),
    "moment": moments,
}


def flip(train_step: Callable, step: int, target: str, bit: int, rank: int) -> Callable:
    """Return a `train_step` that flips a bit in the `step`-th call, and says of which parameter on stderr."""
    num_calls = count(1)

    def with_a_flip(model: ZeroDataParallel, optimizer: ZeroOptimizer, *args: Any) -> Any:
        if next(num_calls) != step:
            return train_step(model, optimizer, *args)

        def flip_now() -> None:
            generator = random.Random(f"{step} {target} {bit} {rank}")
            name, tensor = generator.choice([(n, t) for n, t in TARGETS[target](model, optimizer) if t.numel()])
            bits = tensor.detach().view(INTEGERS[tensor.element_size()])
            index = generator.randrange(tensor.numel())
            was = tensor[index].item()
            bits[index] ^= 1 << bit
            print(
                f"chaos: rank {rank}, step {step}: {target} of {name}, bit {bit}: {was:g} to {tensor[index].item():g}",
                file=sys.stderr,
                flush=True,
            )

        if target != "gradient":
            model.wait_for_updates()
            with torch.no_grad():
                flip_now()
            return train_step(model, optimizer, *args)
        *others, hook, leaves = args

        def flip_after_hook() -> None:
            hook()
            flip_now()

        return train_step(model, optimizer, *others, flip_after_hook, leaves)

    return with_a_flip
