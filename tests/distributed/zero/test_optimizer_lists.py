"""A list of optimizers of one model steps as they do in one process."""

import itertools
from contextlib import nullcontext

import torch
from torch import Tensor

from tests.distributed.zero.optimizers.test_muon import (
    CLIP_NORM,
    DECAY,
    HOST,
    LR,
    TOLERANCE,
    Case,
    PlainMuon,
    build_model,
    is_matrix,
    plain_updates,
    train_plain,
    train_steps,
    whole_params,
)
from tests.distributed.zero.optimizers.test_soap import BETA, EPS, NUM_STEPS, REFRESH_EVERY, PlainSoap
from tests.ranks import run_cases
from tests.scenarios import STAGES, Blocks, Run, as_test, cases, mean_square
from zero.optimizer import ZeroOptimizer
from zero.updates.cautious_adamw import CautiousAdamW
from zero.updates.muon import Muon
from zero.updates.soap import Soap

SETTINGS = {"lr": LR, "weight_decay": DECAY}
# What to do one after the other. b: backward of the next batch; a: the same inside `accumulate`; s: step; z: discard.
SCRIPT = "b s  b s  a a b s  b z  b s  a z b s"


def optimizers_of_disjoint_parameters(run: Run) -> None:
    """Their parameters alternate: most share a bucket with one of the other optimizer. One bias is in neither."""
    model = run.wrap(Blocks())
    params = [param for name, param in model.module.named_parameters() if name != "head.bias"]
    matrices, vectors = ([param for param in params if (param.dim() > 1) is m] for m in (True, False))
    sgd = torch.optim.SGD(matrices, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    optimizer = run.of_list(model, [sgd, torch.optim.AdamW(vectors, lr=0.01, fused=True)], clip_norm=0.3)
    batches = itertools.count()
    for command in SCRIPT.split():
        if command in "ab":
            with model.accumulate() if command == "a" else nullcontext():
                run.record(mean_square(model, run.batch(next(batches)))).backward()
        elif command == "s":
            run.record(optimizer.step())
            optimizer.zero_grad()
            schedule.step()
        else:
            optimizer.zero_grad()
            model.zero_grad()


TABLE = {"lists-of-optimizers": cases(optimizers_of_disjoint_parameters, few=STAGES)}

test_scenario = as_test(__name__, TABLE)


def train_with_three(case: Case) -> dict[str, Tensor]:
    """Muon updates the matrices of attention, SOAP those of the MLP, AdamW the rest; most share a bucket."""
    model, mesh = build_model(case)
    matrices = [(name, param) for name, param in model.module.named_parameters() if is_matrix(name, param)]
    optimizers = [
        Soap(
            [param for name, param in matrices if ".mlp." in name],
            dtype="fp64",
            shampoo_beta=BETA,
            refresh_every=REFRESH_EVERY,
            eps=EPS,
            **SETTINGS,
        ),
        CautiousAdamW(
            [param for name, param in model.module.named_parameters() if not is_matrix(name, param)],
            eps=EPS,
            **SETTINGS,
        ),
        Muon([param for name, param in matrices if ".mlp." not in name], ns_dtype="fp64", **SETTINGS),
    ]
    optimizer = ZeroOptimizer(model, optimizers, tensor=mesh.tensor, clip_norm=CLIP_NORM)
    train_steps(model, optimizer, case.num_micro_batches, range(NUM_STEPS))
    return whole_params(model, optimizer.tensor)


def test_two_updates_that_put_matrices_together_and_adamw_equal_one_process():
    of_mlp, of_attention = plain_updates(PlainSoap), {}

    def update(name: str, param: Tensor, grad: Tensor) -> None:
        if ".mlp." in name:
            of_mlp(name, param, grad)
        else:
            of_attention.setdefault(name, PlainMuon(name, param, {})).update(grad)

    expected = train_plain(update, NUM_STEPS, eps=EPS)
    cases = [Case(0, 2), Case(1, 2, bucket_numel=900), Case(2, 1, 2, num_micro_batches=2), Case(3, 2, offload=HOST)]
    for found in run_cases(2, train_with_three, [[case] for case in cases]):
        for params in found:
            torch.testing.assert_close(params, expected, rtol=0, atol=TOLERANCE)
