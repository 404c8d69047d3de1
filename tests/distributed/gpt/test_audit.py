"""Audits: a flipped bit in a computation or in a state at rest is found and its rank is named, and no other is."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.audit import Auditor, DivergenceError, find_faulty
from gpt.builder.leaves import Leaves
from gpt.builder.train_state import TrainState
from gpt.monitor.node_map import span
from gpt.settings.parser import parse_settings
from gpt.train_step import differentiate, loss_factor, train_step
from parallel.validation.errors import ConfigError
from tests.distributed.gpt.test_reproducible import (
    BASE,
    CONTEXT,
    GPT2,
    GROUPS,
    LLAMA,
    LOCAL,
    S1,
    S3,
    SMALL,
    build_with_loader,
)
from tests.ranks import run_ranks
from zero.extensions.hashes import INTEGERS, GradientHashes
from zero.formulas.traffic import axis_bytes

TENSOR = "--parallel.tensor_size=2"
COMPUTED, AT_REST = ("activation", "gradient", "weight"), ("master", "moment", "shard")


@dataclass(frozen=True)
class Fault:
    """A bit that is flipped on one rank; `is_sticky`: in each pass, else in that of the audited leaf itself."""

    kind: str
    rank: int
    is_sticky: bool
    seed: int


def flip(tensor: Tensor, chance: random.Random) -> None:
    flat = tensor.detach().view(-1)
    if flat.numel():
        bits = flat.view(INTEGERS[tensor.element_size()])
        bits[chance.randrange(flat.numel())] ^= 1 << chance.randrange(8 * tensor.element_size() - 1)


@contextmanager
def flipped(tensor: Tensor, chance: random.Random) -> Iterator[None]:
    """Flip a bit inside this context; it is flipped back unless an update has written the tensor anew."""
    before = tensor.clone()
    flip(tensor, chance)
    after = tensor.clone()
    yield
    if torch.equal(tensor.view(torch.uint8), after.view(torch.uint8)):
        tensor.copy_(before)


@contextmanager
def injected(fault: Fault, state: TrainState, call: int) -> Iterator[None]:
    """Let the fault happen inside this context: a transient one in this call of forward, or backward, of the model."""
    chance, module, calls = random.Random(fault.seed), state.model.module, itertools.count()

    def damaged(value: Any) -> Any:
        if isinstance(value, tuple):
            return damaged(value[0]), *value[1:]
        if next(calls) != call and not fault.is_sticky:
            return value
        value = value.clone(memory_format=torch.contiguous_format)
        flip(value, random.Random(fault.seed))
        return value

    handle: Any = None
    if fault.rank != state.mesh.rank:
        yield
    elif fault.kind == "weight":  # of a rank that keeps all of them
        (flat,) = state.model.flats
        with flipped(flat.full, chance):
            yield
    elif fault.kind in AT_REST:
        bucket = chance.choice([bucket for bucket in state.optimizer.buckets if state.optimizer.pieces_of(bucket)])
        states = state.optimizer.states_of(state.optimizer.pieces_of(bucket)[0])
        moments = states.get("exp_avg", bucket.master)  # Muon's are of whole matrices
        with flipped({"master": bucket.master, "shard": bucket.params.own, "moment": moments}[fault.kind], chance):
            yield
    elif fault.kind == "gradient":
        handle = chance.choice(list(module.parameters())).register_hook(damaged)
        yield
    else:
        layers = [part for part in module.modules() if isinstance(getattr(part, "weight", None), Tensor)]
        handle = chance.choice(layers).register_forward_hook(lambda _module, _inputs, output: damaged(output))
        yield
    if handle is not None:
        handle.remove()


def audit(options: tuple[str, ...], faults: list[Fault | None]) -> list[tuple[bool, str]]:
    """Run a step for each fault; return whether it changes the leaf of this rank or its states, and the error."""
    settings = parse_settings([*BASE, *options])
    state, loader = build_with_loader(settings)
    model, mesh = state.model, state.mesh
    auditor = Auditor(1, state, loader, [f"place {rank}" for rank in range(mesh.data.size * mesh.tensor.size)])
    num_samples, found = settings.train.global_batch_size, []
    plan = [(step * num_samples, num_samples) for step in range(1, len(faults) + 1)]
    for step, (samples, batches, fault) in enumerate(zip(plan, loader.steps(plan), faults, strict=True), 1):
        leaves, leaf = replace(state.leaves, step=step), step % len(batches)
        scale = loss_factor(model, state.optimizer, len(batches))

        def hash_of_leaf(leaves: Leaves = leaves, leaf: int = leaf, batches: Any = batches, scale: Any = scale) -> int:
            leaves.seed(leaf, len(batches))
            with model.extended(GradientHashes(state.device, discards=True)) as hashes:
                differentiate(model, batches[leaf], mesh, None, scale)
            return int(hashes[0])

        changes = fault is not None and fault.kind in AT_REST and fault.rank == mesh.rank
        if fault is not None and fault.kind not in AT_REST:
            clean = hash_of_leaf()
            with injected(fault, state, 0):
                changes = hash_of_leaf() != clean
        error = ""
        with nullcontext() if fault is None else injected(fault, state, leaf):
            try:
                with auditor.step(step, samples, batches) as of_step:
                    train_step(model, state.optimizer, batches, mesh, leaves=of_step)
                auditor.raise_found()
            except DivergenceError as raised:
                error = str(raised)
                model.zero_grad()
                auditor.restart()
        found.append((changes, error))
    return found


def assert_named(num_ranks: int, options: tuple[str, ...], kinds: tuple[str, ...], num_faults: int) -> Counter[str]:
    """Inject faults, each after a step without one; return how many were named, and how many changed nothing."""
    chance, faults = random.Random(f"{num_ranks} {options}"), list[Fault | None]([None])
    for seed in range(num_faults):
        faults += [Fault(chance.choice(kinds), chance.randrange(num_ranks), chance.random() < 0.5, seed), None]
    outcomes, counts = run_ranks(num_ranks, audit, options, faults), Counter[str]()
    for number, fault in enumerate(faults):
        errors = {of_rank[number][1] for of_rank in outcomes}
        (error,) = errors  # the same on all ranks
        if fault is None:
            assert not error
            continue
        # A fault that stays may change the gradients of another leaf, which its rank computes again.
        changes = any(of_rank[number][0] for of_rank in outcomes) or (fault.is_sticky and bool(error))
        assert bool(error) == changes, (fault, error)
        counts[f"{fault.kind}: {'named' if changes else 'changes nothing'}"] += 1
        if changes:
            is_group = fault.kind not in AT_REST and not {TENSOR, CONTEXT}.isdisjoint(options)
            ranks = [fault.rank // 2 * 2, fault.rank // 2 * 2 + 1] if is_group else [fault.rank]
            name = f"rank{'s' if is_group else ''} {span(ranks)} (place {', place '.join(map(str, ranks))})"
            assert name in error, (fault, error)
            assert error.count("place") == len(ranks), (fault, error)
    return counts


CASES = [  # ranks, options, kinds of faults
    (4, (*GPT2, S1), (*COMPUTED, *AT_REST[:2])),
    (3, (*LLAMA, S3, SMALL, "--offload.mode=host"), (*COMPUTED[:2], *AT_REST)),
    (
        4,
        (*GPT2, S3, SMALL, GROUPS, "--zero.optimizer_over=all", "--data.mask_documents=true"),
        (*COMPUTED[:2], *AT_REST),
    ),
    (6, (*LLAMA, S3, TENSOR, "--optimizer.name=muon"), (*COMPUTED[:2], "master")),
    (6, (*GPT2, S3, LOCAL, "--train.reproducible_blocks=3", CONTEXT), COMPUTED[:2]),
]

CASE_NAMES = ("stage 1", "stage 3", "groups", "tensor", "context")


@pytest.mark.parametrize(("case", "num_faults"), [*zip(CASES, (2, 2, 2, 1, 1), strict=True)], ids=CASE_NAMES)
def test_a_fault_is_named_with_its_rank(case, num_faults):
    counts = assert_named(*case, num_faults=num_faults)
    assert any(name.endswith(": named") for name in counts)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_each_of_many_faults_is_named_with_its_rank(case, record_property):
    record_property("faults", dict(assert_named(*case, num_faults=50)))


@pytest.mark.full
@pytest.mark.parametrize("options", [(*GPT2, S1), (*LLAMA, S3, SMALL)], ids=["stage 1", "stage 3"])
def test_no_audit_of_a_thousand_names_a_sound_rank(options):
    outcomes = run_ranks(4, audit, options, [None] * 1000, timeout_seconds=3600)  # a second a step, if busy
    assert {error for of_rank in outcomes for _, error in of_rank} == {""}


def sent_by_audits(options: tuple[str, ...], every: int) -> list[tuple[int, int, float]]:
    """Return (bytes, collectives, loss) of a step without audits, one that compares states at rest, and the next one.

    That one is audited with every=6. every=0: no step has audits.
    """
    settings = parse_settings([*BASE, *LLAMA, *options])
    state, loader = build_with_loader(settings)
    auditor, none = (Auditor(each, state, loader, ["place"] * 4) for each in (every, 0))
    log, sent = state.mesh.log, list[tuple[int, int, float]]()
    log.keeps_events = True
    plan = [(step * 12, 12) for step in range(6)]  # by the fourth the order of units is known
    for step, (samples, batches) in enumerate(zip(plan, loader.steps(plan), strict=True), 1):
        log.clear()
        with (none if step < 5 else auditor).step(step, samples, batches) as leaves:
            loss, _ = train_step(state.model, state.optimizer, batches, state.mesh, leaves=leaves)
        events = [event for event in log.events if event.phase != "agreement"]
        sent.append((sum(event.wire_bytes for event in events), len(events), loss.item()))
    model, numels = state.model, [flat.layout.numel for flat in state.model.flats]
    model.wait_for_updates()
    if model.config.stage == 3:
        kept = 2 * (numels[0] + numels[-1])  # the root and the last block
        sizes = model.group_size, model.data.size // model.group_size
        gathered, _ = axis_bytes(model.config.policy, 2 * sum(numels), sizes, 1, gradient_bytes=(0, 0), kept_bytes=kept)
        sent[-1] = sent[-1][0] - int(gathered), *sent[-1][1:]
    return sent[-3:]


@pytest.mark.parametrize("options", [(S1,), (S3, GROUPS)], ids=["stage 1", "groups"])
def test_states_at_rest_take_no_message_and_audits_what_a_micro_batch_gathers(options):
    found, unaudited = (run_ranks(4, sent_by_audits, options, every) for every in (6, 0))
    for of_rank, of_rank_without in zip(found, unaudited, strict=True):
        without, at_rest, audited = of_rank
        assert at_rest[:2] == (without[0] + 8 * 3, without[1])  # a number beside the losses
        assert audited[0] == at_rest[0] + 2 * 8 * 3  # two hashes
        assert [loss for *_, loss in of_rank] == [loss for *_, loss in of_rank_without]


@pytest.mark.parametrize(
    ("own", "again", "third", "found"),
    [
        ([7, 8, 9, 5], [8, 9, 5, 7], [], ([], [])),
        ([7, 0, 9, 5], [8, 9, 5, 7], [5, 7, 8, 9], ([1], [])),  # in the step itself
        ([7, 8, 9, 5], [8, 0, 5, 7], [5, 7, 8, 9], ([1], [])),  # in the audit
        ([7, 0, 9, 5], [8, 0, 5, 7], [5, 0, 8, 9], ([1], [])),  # in all of its passes
        ([7, 8, 0, 5], [8, 9, 5, 7], [5, 7, 8, 1], ([], [(1, 2)])),  # no two groups agree
        ([7, 0], [8, 7], [8, 7], ([], [(0, 1)])),  # no third one
        ([7], [0], [7], ([], [(0,)])),
    ],
)
def test_the_group_that_two_others_contradict_is_faulty(own, again, third, found):
    assert find_faulty(own, again, third) == found


def test_an_audit_needs_runs_that_are_the_same_in_any_layout():
    with pytest.raises(ConfigError, match=r"guard.audit_every=3 .*train.reproducible=layout"):
        parse_settings([*BASE, *GPT2, "--train.reproducible=run", "--guard.audit_every=3"])
