"""States divided over groups and over all ranks, with every placement, store and optimizer, train as in one process."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.zero.optimizers import test_muon as muon
from tests.distributed.zero.optimizers import test_soap as soap
from tests.distributed.zero.optimizers.test_muon import BETAS, TOLERANCE, Case
from tests.pairwise import covering, noting
from tests.ranks import run_cases
from tests.twins import all_params
from zero.settings.config import NO_OFFLOAD, OffloadConfig
from zero.updates.adamw_bf16 import AdamWBf16
from zero.updates.muon import Muon

NUM_MICRO_BATCHES = {2: 2, 4: 2, 8: 3}  # by the number of data ranks: equal ones of the 24 sequences
OFFLOADS = {
    "none": NO_OFFLOAD,
    "both": OffloadConfig("host"),
    "optimizer": OffloadConfig("host", ("optimizer",)),
    "parameters": OffloadConfig("host", ("parameters",)),
}
FACTORS: dict[str, list[Any]] = {
    "row": [(1, "all"), (3, "group"), (3, "all")],
    "sizes": [(4, 2, 1), (2, 1, 2)],  # data ranks, those of a group, tensor ranks
    "store": ["none", "partition_host"],
    "offload": ["none", "both"],
    "optimizer": ["adamw", "muon", "soap"],
}
ALL_FACTORS = FACTORS | {
    "row": [(1, "all"), (2, "group"), (2, "all"), (3, "group"), (3, "all")],
    "sizes": [(4, 2, 1), (4, 2, 2), (8, 4, 1), (8, 2, 1)],
    "store": ["none", "keep", "selective", "partition", "partition_host"],
    "offload": list(OFFLOADS),
    "optimizer": ["adamw", "adamw_bf16", "muon", "soap"],
}


def is_possible(combination: dict) -> bool:
    if combination["store"] == "partition" and combination["sizes"][2] == 1:
        return False
    return combination["offload"] != "parameters" or combination["row"][0] == 3


def train(combination: dict) -> dict[str, Tensor]:
    (stage, over), (data_size, group_size, tensor_size) = combination["row"], combination["sizes"]
    settings = {"overlap_gather": stage < 3, "store": combination["store"]}
    case = Case(
        stage, data_size, tensor_size, shard_size=group_size, optimizer_over=over,
        offload=OFFLOADS[combination["offload"]], **settings,
    )  # fmt: skip
    start, num_steps, _ = OPTIMIZERS[combination["optimizer"]]
    model, optimizer = start(case)
    muon.train_steps(model, optimizer, NUM_MICRO_BATCHES[data_size], range(num_steps))
    return muon.whole_params(model, optimizer.tensor)


def start_adamw(case: Case, kind: type[torch.optim.AdamW] = torch.optim.AdamW):
    of_torch = {"fused": True} if kind is torch.optim.AdamW else {}
    return muon.start(case, kind=kind, groups=all_params, betas=BETAS, **of_torch)


@cache
def train_whole_with_adamw(kind: type[torch.optim.AdamW] = torch.optim.AdamW) -> dict[str, Tensor]:
    return muon.train_plain(None, muon.NUM_STEPS, adam_type=kind)


OPTIMIZERS: dict[str, tuple[Callable, int, Callable[[], dict[str, Tensor]]]] = {
    "adamw": (start_adamw, muon.NUM_STEPS, train_whole_with_adamw),
    "adamw_bf16": (partial(start_adamw, kind=AdamWBf16), muon.NUM_STEPS, partial(train_whole_with_adamw, AdamWBf16)),
    "muon": (lambda case: muon.start(case, kind=Muon, ns_dtype="fp64"), muon.NUM_STEPS, muon.train_whole),
    "soap": (soap.start_soap, soap.NUM_STEPS, soap.train_whole),
}


def check(combinations: list[dict]) -> None:
    for sizes in {combination["sizes"] for combination in combinations}:
        chosen = [combination for combination in combinations if combination["sizes"] == sizes]
        for combination, found in zip(
            chosen, run_cases(sizes[0] * sizes[2], train, [[c] for c in chosen]), strict=True
        ):
            expected = OPTIMIZERS[combination["optimizer"]][2]()
            for params in found:
                with noting(combination):
                    torch.testing.assert_close(params, expected, rtol=0, atol=TOLERANCE)


def test_every_pair_of_settings_equals_one_process():
    on_tensor_ranks = {"row": (2, "all"), "sizes": (2, 1, 2), "store": "none", "offload": "none"}
    check([*covering(FACTORS, 2, is_possible), on_tensor_ranks | {"optimizer": "adamw_bf16"}])


@pytest.mark.full
@pytest.mark.parametrize("sizes", ALL_FACTORS["sizes"], ids=str)
def test_every_three_settings_equal_one_process(sizes):
    check([combination for combination in covering(ALL_FACTORS, 3, is_possible) if combination["sizes"] == sizes])
