"""Muon on whole parameters against torch's, and what a skipped step leaves."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from lab.observe.memory_tracker import MemoryTracker
from parallel.memory_kinds import TensorKind
from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from tests.distributed.zero.test_zero_optimizer import NoWaiting
from zero.checkpoint.resident import buffer_bytes
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig
from zero.updates.adamw8bit import AdamW8bit
from zero.updates.adamw_bf16 import AdamWBf16
from zero.updates.cautious_adamw import CautiousAdamW
from zero.updates.muon import SAFETY, Muon, orthogonalize_, polynomials, runs_of
from zero.updates.soap import Soap

CPU = torch.device("cpu")
SHAPES = [(6, 20), (20, 6), (8, 8)]


def params_of(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_bits_are_torchs(adjust_lr_fn, nesterov):
    settings = {"lr": 0.02, "weight_decay": 0.3, "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
    own, torchs = params_of(SHAPES), params_of(SHAPES)
    vectors, torchs_vectors = params_of([(7,)]), params_of([(7,)])
    muon = Muon(own, ns_eps=1e-7, **settings)
    own_adam = CautiousAdamW(vectors, lr=0.02, weight_decay=0.3, betas=(0.8, 0.9))
    expected = torch.optim.Muon(torchs, eps=1e-7, **settings)
    adam = torch.optim.AdamW(torchs_vectors, lr=0.02, weight_decay=0.3, betas=(0.8, 0.9), fused=True)
    for step in range(4):
        for params in (own, torchs, vectors, torchs_vectors):
            set_gradients(params, step)
        for optimizer in (muon, own_adam, expected, adam):
            optimizer.step()
    for found, param in zip(own + vectors, torchs + torchs_vectors, strict=True):
        assert found.equal(param)


def test_the_learning_rate_of_matrices_has_a_factor():
    pair = [params_of(SHAPES) for _ in range(2)]
    optimizers = Muon(pair[0], lr=0.02, lr_factor=4.0), Muon(pair[1], lr=0.08)
    for params, optimizer in zip(pair, optimizers, strict=True):
        set_gradients(params, 0)
        optimizer.step()
    assert all(a.equal(b) for a, b in zip(*pair, strict=True))


def iterated_by_muon(grad: Tensor, **settings: str) -> Tensor:
    """Return what a step with a rate of 1 subtracts: nothing but the iteration changes the gradient."""
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    plain = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "ns_dtype": "fp64", "adjust_lr_fn": "original"}
    Muon([param], lr=1.0, **plain, **settings).step()
    return -param.detach()


def test_polar_express_has_the_authors_arithmetic_and_ends_near_one():
    """Singular values from 1e-2 to 1 of the largest; algorithm 1 of Amsel et al., 2025."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 6, generator=generator, dtype=torch.float64)).Q for n in (6, 9))
    grad = left * torch.logspace(-2, 0, 6, dtype=torch.float64) @ right.T
    x = grad / (grad.norm() * 1.01)
    for a, b, c in [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ]:
        y = x / 1.01
        gram = y @ y.T
        x = a * y + (b * gram + c * gram @ gram) @ y
    torch.testing.assert_close(iterated_by_muon(grad, iteration="polar_express"), x, rtol=0, atol=1e-13)
    assert (torch.linalg.svdvals(x) - 1).abs().max() < 0.14  # Newton-Schulz: 0.32


ITERATIONS = {"newton_schulz": 1.0, "polar_express": 1 / SAFETY}  # and their norms


def iterated(matrices: Tensor, iteration: str, iterates_on: str, ns_steps: int = 5) -> Tensor:
    """Return matrices after an iteration in their type; once: that on Gram matrices, without restarts."""
    steps = polynomials(Muon.own_defaults | {"iteration": iteration, "ns_steps": ns_steps})
    shape = matrices.size(1), matrices.size(2)
    matrices = matrices.clone()
    runs = [steps] if iterates_on == "once" else runs_of(steps, shape, iterates_on)
    orthogonalize_(matrices, runs, 1e-7, ITERATIONS[iteration])
    return matrices


@pytest.mark.parametrize("ns_steps", [1, 5, 8])
@pytest.mark.parametrize("iteration", ITERATIONS)
def test_both_forms_of_an_iteration_have_the_same_result(iteration, ns_steps):
    """Matrices in fp64; those whose sides differ little have the same bits."""
    for shape in [(6, 20), (20, 6), (40, 61), (8, 12), (8, 8)]:
        matrices = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        matrix, gram = (iterated(matrices, iteration, name, ns_steps) for name in ("matrix", "gram"))
        torch.testing.assert_close(gram, matrix, rtol=0, atol=1e-10)
        assert gram.equal(matrix) == (ns_steps == 1 or max(shape) <= 1.5 * min(shape))


def spectra(rows: int) -> dict[str, Tensor]:
    exponents = torch.linspace(0, 1, rows, dtype=torch.float64)
    rank_one = torch.eye(rows, dtype=torch.float64)[0]
    return {
        "equal": torch.ones(rows, dtype=torch.float64),
        "1e-3 to 1": 1e-3**exponents,
        "1e-6 to 1": 1e-6**exponents,
        "half of the rank": (exponents < 0.5).double(),
        "rank 1": rank_one,
        "rank 1 and a little of the rest": rank_one.clamp(min=0.01),
        "none": torch.zeros(rows, dtype=torch.float64),
    }


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("iteration", ITERATIONS)
def test_gram_matrices_round_like_the_matrix_and_only_with_restarts(iteration, dtype):
    """Errors are within a factor of 4 for each spectrum; without restarts the worst is more than 20 times, or NaN."""
    worst = 0.0
    for rows, columns in [(32, 64), (64, 256), (128, 320)]:
        generator = torch.Generator().manual_seed(0)
        random = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        left, _, right = torch.linalg.svd(random, full_matrices=False)
        for name, values in {"random": None, **spectra(rows)}.items():
            matrix = (random if values is None else (left * values) @ right)[None].to(dtype)
            exact = iterated(matrix.double(), iteration, "matrix")
            plain, gram, once = (
                relative_error(iterated(matrix, iteration, on), exact) for on in ("matrix", "gram", "once")
            )
            assert gram <= 4 * plain, (name, rows, plain, gram)
            worst = max(worst, math.inf if math.isnan(once) else once / max(plain, 1e-30))
    assert worst > 20


@pytest.mark.parametrize("iterates_on", ["matrix", "gram"])
@pytest.mark.parametrize("iteration", ITERATIONS)
def test_flops_are_those_of_the_products(iteration, iterates_on):
    for shape in [(6, 20), (20, 6), (8, 12), (8, 13), (8, 8)]:
        matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
        with FlopCounterMode(display=False) as counter:
            iterated(matrix, iteration, iterates_on)
        flops = {
            on: Muon.flops(shape, Muon.own_defaults | {"iteration": iteration, "iterates_on": on})
            for on in ("matrix", "gram")
        }
        assert counter.get_total_flops() == 2 * flops[iterates_on]
        assert flops["gram"] < flops["matrix"] if max(shape) > 1.5 * min(shape) else flops["gram"] == flops["matrix"]


def test_a_state_dict_does_not_say_how_the_iteration_is_computed():
    of_matrix, of_gram = (
        ZeroOptimizer(ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(1)), Muon, iterates_on=iterates_on)
        for module, iterates_on in [(nn.Linear(4, 8, bias=False), "matrix"), (nn.Linear(4, 8, bias=False), "gram")]
    )
    of_gram.load_state_dict(of_matrix.state_dict())
    assert of_gram.param_groups[0]["iterates_on"] == "gram"


class Batches(Muon):
    """Muon that notes the number of matrices in each batch."""

    def transform(self, matrices, group, states):
        self.sizes = [*getattr(self, "sizes", []), len(matrices)]
        super().transform(matrices, group, states)


@pytest.mark.parametrize(("summed", "sizes"), [("message", [3]), ("leaves", [1, 1, 1])])
def test_equal_matrices_are_one_batch_unless_bits_may_not_depend_on_ranks(summed, sizes):
    module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    model = ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(1, sum_over_ranks=summed))
    optimizer = ZeroOptimizer(model, Batches, lr=0.1)
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    assert optimizer.inner.sizes == sizes


class Layers(nn.Module):
    """Two linear layers, of whose weights `packed` are several matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh()).square().sum()


def optimizers_of(module: Layers, kind: Callable[..., Optimizer], *, fused: bool = True) -> list[Optimizer]:
    """Return an optimizer of the weights, and AdamW of the biases."""
    weights, biases = [module.first.weight, module.last.weight], [module.first.bias, module.last.bias]
    return [kind(weights, lr=0.1), CautiousAdamW(biases, lr=0.1, fused=fused)]


KINDS = {
    "muon": Muon,
    "muon on gram matrices": partial(Muon, iterates_on="gram"),
    "cautious normuon": partial(Muon, row_beta=0.9, cautious_decay=True),
    "cautious adamw": partial(CautiousAdamW, cautious_decay=True),
    "adamw8bit": AdamW8bit,
    "adamw_bf16": AdamWBf16,
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_with_an_infinite_gradient_leaves_no_trace(kind, fused):
    found = []
    for bad_steps in ((0, 2), ()):
        module = Layers()
        model = ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(1, bucket_numel=32, alignment=256))
        optimizer = ZeroOptimizer(model, optimizers_of(module, kind, fused=fused), warn_skipped=False)
        good = iter(range(2))
        for step in range(2 + len(bad_steps)):
            factor = math.inf if step in bad_steps else 1.0 + next(good)
            (model(torch.ones(3, 6)) * factor).backward()
            optimizer.step()
        assert optimizer.num_skipped.item() == len(bad_steps)
        inner = [
            dict(sorted(state.items())) for update in optimizer.updates for state in update.optimizer.state.values()
        ]
        states = [*inner, *(update.states() for update in optimizer.updates)]
        found.append([*module.parameters(), *(value for state in states for value in state.values())])
    assert len(found[0]) == len(found[1])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", [Muon, Soap])
def test_the_flag_of_a_grad_scaler_skips_updates_of_whole_parameters(kind):
    torch.manual_seed(0)
    start, good, bad = torch.randn(6, 4), torch.randn(6, 4), torch.full((6, 4), math.inf)
    found = []
    for grads in ([good, bad, -good], [good, -good]):
        param = nn.Parameter(start.clone())
        optimizer = kind([param], lr=0.1)
        for grad in grads:
            param.grad = grad.clone()
            if len(grads) == 3:
                optimizer.found_inf = torch.tensor(float(grad is bad))
            optimizer.step()
        found.append(param)
    assert found[0].equal(found[1])


@pytest.mark.parametrize("kind", [*KINDS.values(), Soap], ids=[*KINDS, "soap"])
def test_a_step_reads_no_value_of_a_tensor(kind):
    module = Layers()
    model = ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(1, bucket_numel=32, alignment=256))
    optimizer = ZeroOptimizer(model, optimizers_of(module, kind))
    for _ in range(2):
        loss = model(torch.ones(3, 6))
        with NoWaiting():
            loss.backward()
            optimizer.step()


def test_no_message_outlives_a_step():
    with MemoryTracker(CPU) as tracker:
        module = Layers()
        model = ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(1, bucket_numel=32))
        optimizer = ZeroOptimizer(model, optimizers_of(module, Muon))
        for _ in range(2):
            model(torch.ones(3, 6)).backward()
            optimizer.step()
        assert tracker.device.resident[TensorKind.BUFFERS] == sum(buffer_bytes(model, optimizer).values())


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [(Muon, "row_beta", (0.9, 0.5)), (AdamWBf16, "seed", (3, 4)), (Soap, "dtype", ("fp64", "fp32"))],
)
def test_a_setting_that_groups_have_in_common_is_taken_from_them_and_may_not_differ(kind, name, values):
    found = []
    for by_group in (True, False):
        params = params_of(SHAPES[:2])
        of_group, of_all = ({name: values[0]}, {}) if by_group else ({}, {name: values[0]})
        optimizer = kind([{"params": [param], **of_group} for param in params], lr=0.02, **of_all)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
        found.append(params)
    assert all(one.equal(other) for one, other in zip(*found, strict=True))
    groups = [{"params": [param], name: value} for param, value in zip(params, values, strict=True)]
    with pytest.raises(ValueError, match=rf"{name} is \[.*\] in groups of .*; give all of them the same value"):
        kind(groups, lr=0.02)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Muon, {"ns_dtype": "fp16"}, "ns_dtype='fp16' .*'bf16' or 'fp32' or 'fp64'"),
        (Muon, {"iteration": "newton"}, "iteration='newton' .*'newton_schulz' or 'polar_express'"),
        (Muon, {"iterates_on": "rows"}, "iterates_on='rows' .*'gram' or 'matrix'"),
        (Muon, {"adjust_lr_fn": "match_rms"}, "adjust_lr_fn='match_rms' .*'match_rms_adamw'"),
        (Soap, {"dtype": "bf16"}, "Soap has dtype='bf16' in a group; choose 'fp32' or 'fp64'"),
        (AdamW8bit, {"betas": (0.9, 1.0)}, r"AdamW8bit has betas=\(0.9, 1.0\) in a group; choose numbers from 0 to"),
        *((kind, {"lr": -1.0}, "lr=-1.0 in a group, which is below 0") for kind in (Muon, Soap, AdamWBf16)),
    ],
)
def test_settings_that_a_method_does_not_know_are_refused(kind, settings, message):
    for of_groups, of_all in ((settings, {}), ({}, settings)):
        with pytest.raises(ValueError, match=message):
            kind([{"params": params_of(SHAPES), **of_groups}], **of_all)


@pytest.mark.parametrize("kind", [Muon, Soap, AdamW8bit, AdamWBf16])
def test_settings_of_adamw_that_a_method_has_not_are_refused(kind):
    for setting in ("maximize", "amsgrad"):
        with pytest.raises(ValueError, match=f"{kind.__name__} has {setting}=True in a group; choose False"):
            kind([{"params": params_of(SHAPES), setting: True}])
        with pytest.raises(ValueError, match=f"{kind.__name__} has no setting {setting}; choose from lr, "):
            kind(params_of(SHAPES), **{setting: True})
    with pytest.raises(ValueError, match=rf"give two optimizers: ZeroOptimizer\(model, \[{kind.__name__}"):
        kind([{"params": params_of(SHAPES), "update": "adamw"}])


METHODS = [Muon, Soap, AdamW8bit, AdamWBf16]


@pytest.mark.parametrize("kind", [*METHODS, CautiousAdamW])
def test_a_closure_computes_the_gradients_of_a_step(kind):
    (param,), (expected,) = params_of(SHAPES[:1]), params_of(SHAPES[:1])
    by_closure, optimizer = kind([param]), kind([expected])

    def closure() -> Tensor:
        by_closure.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert by_closure.step(closure) > 0
    expected.square().sum().backward()
    assert optimizer.step() is None
    assert param.equal(expected)


@pytest.mark.parametrize("kind", [*METHODS, CautiousAdamW])
def test_a_grad_scaler_gives_gradients_without_its_scale(kind):
    """Its scale changes between steps, and momentum would have gradients of both scales."""
    (param,), (expected,) = params_of(SHAPES[:1]), params_of(SHAPES[:1])
    scaled, optimizer = (kind([one], cautious_decay=True) for one in (param, expected))
    scaler = torch.amp.GradScaler("cpu", 4.0, growth_interval=1)
    for step in range(3):
        weights = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
        (expected * weights).sum().backward()
        scaler.scale((param * weights).sum()).backward()
        optimizer.step()
        scaler.step(scaled)
        scaler.update()
        optimizer.zero_grad()
        scaled.zero_grad()
    assert param.equal(expected)


@pytest.mark.parametrize("kind", METHODS)
def test_a_state_dict_of_torch_is_refused(kind):
    with pytest.raises(RuntimeError, match=rf"states of {kind.__name__}; .* `save` and `load` of zero"):
        kind(params_of(SHAPES)).state_dict()


def test_a_vector_in_a_group_of_matrices_is_refused():
    module = Layers()
    model = ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(1))
    with pytest.raises(ConfigError, match=r"first.bias of shape \(12,\) has 1 dims and is no matrix"):
        ZeroOptimizer(model, Muon)
    with pytest.raises(ConfigError, match=r"a group has update='sgd'; choose 'adamw', or leave it out"):
        ZeroOptimizer(model, Muon, [{"params": module.parameters(), "update": "sgd"}])
