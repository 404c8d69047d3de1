"""The head and the loss by chunks of tokens, against the logits of all tokens and words in one process."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig
from parallel.mesh import Axis, Mesh
from parallel.tensor.linear_cross_entropy import linear_cross_entropy
from parallel.tensor.softmax import Softmax, capped, log_sums
from parallel.tensor.token_layout import ReplicatedTokens, SplitTokens
from tests.ranks import run_cases, run_ranks

NUM_TOKENS, NUM_WORDS, FEATURES = 36, 64, 8
LAYOUTS = (ReplicatedTokens, SplitTokens)
VOCAB_SIZES = (64, 61, 17)  # no padding, some padding, ranks with only padding
CHUNKS = (1000, 20, 4)  # tokens: all at once; two chunks; many
OPTIONS = (Softmax(cap=2.0), Softmax(z_loss=0.3), Softmax(cap=2.0, z_loss=0.3))
ONE_DEVICE = ReplicatedTokens(Axis.trivial("tensor"))


def head(vocab_size: int, dtype: torch.dtype = torch.float64, num_tokens: int = NUM_TOKENS) -> tuple[Tensor, ...]:
    """Return (x, weight, targets), of which some are left out."""
    generator = torch.Generator().manual_seed(vocab_size)
    x = torch.randn(num_tokens, FEATURES, generator=generator, dtype=torch.float64)
    weight = torch.randn(NUM_WORDS, FEATURES, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab_size, (num_tokens,), generator=generator)
    targets[[3, -1]] = -1
    return x.to(dtype), weight.to(dtype), targets


def own_losses_and_gradients(cases: list[tuple]) -> list[tuple[float, Tensor | None, Tensor | None]]:
    """Return (loss, gradients of this rank's part of x and of the weight) for each case."""
    axis, results = Mesh.create(torch.distributed.get_world_size()).tensor, []
    for layout, vocab_size, chunk_tokens, needs_x, needs_weight, softmax in cases:
        tokens = layout(axis)
        x, weight, targets = head(vocab_size)
        own_x = tokens.cut(x).clone().requires_grad_(needs_x)
        own_weight = weight.chunk(axis.size)[axis.rank].clone().requires_grad_(needs_weight)
        scale = torch.tensor(5.0)
        loss = linear_cross_entropy(
            own_x,
            own_weight,
            targets,
            vocab_size,
            tokens,
            loss_scale=scale,
            softmax=replace(softmax, chunk_tokens=chunk_tokens),
        )
        (3 * loss).backward()  # another factor than the one that was announced
        results.append((loss.item(), own_x.grad, own_weight.grad))
    return results


def loss_and_gradients_of_whole_logits(vocab_size: int, softmax: Softmax) -> tuple[float, Tensor, Tensor]:
    """Return the cross-entropy, and gradients of its sum with the z-loss."""
    x, weight, targets = head(vocab_size)
    x.requires_grad_()
    weight.requires_grad_()
    logits = (x @ weight.t())[:, :vocab_size]
    if softmax.cap is not None:
        logits = softmax.cap * torch.tanh(logits / softmax.cap)
    loss = F.cross_entropy(logits, targets, ignore_index=-1)
    z_loss = softmax.z_loss * logits[targets >= 0].logsumexp(-1).square().mean()
    (3 * (loss + z_loss)).backward()
    return loss.item(), x.grad, weight.grad


@pytest.mark.parametrize("tensor_size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_the_loss_and_its_gradients_equal_those_of_whole_logits(tensor_size):
    cases = [(*case, True, True, Softmax()) for case in itertools.product(LAYOUTS, VOCAB_SIZES, CHUNKS)]
    cases += [(*case[:3], not needs_x, needs_x, Softmax()) for case in cases[::6] for needs_x in (False, True)]
    cases += [(*case[:3], True, True, softmax) for case in cases[1::5] for softmax in OPTIONS]
    of_ranks = run_ranks(tensor_size, own_losses_and_gradients, cases)
    for (layout, vocab_size, _, needs_x, needs_weight, softmax), *of_case in zip(cases, *of_ranks, strict=True):
        loss, grad_x, grad_weight = loss_and_gradients_of_whole_logits(vocab_size, softmax)
        losses, grads_x, grads_weight = zip(*of_case, strict=True)
        assert losses == pytest.approx([loss] * tensor_size, rel=1e-14)
        if needs_x:
            found = torch.cat(grads_x) if layout is SplitTokens else grads_x[0]
            assert layout is SplitTokens or all(grad.equal(found) for grad in grads_x)
            torch.testing.assert_close(found, grad_x, rtol=1e-12, atol=1e-15)
        if needs_weight:
            found = torch.cat(grads_weight)
            torch.testing.assert_close(found, grad_weight, rtol=1e-12, atol=1e-15)
            assert found[vocab_size:].eq(0).all()


def difference_of_gradients_of_a_model(layout: type, dtype: torch.dtype) -> float:
    """Return the largest difference from the gradients of the whole logits, for a number of tokens that is odd.

    The weight of the head is that of the embedding: its two gradients add.
    """
    torch.set_default_dtype(dtype)
    axis = Mesh.create(torch.distributed.get_world_size()).tensor
    config = ModelConfig(1, 8, 2, seq_length=7, vocab_size=61, vocab_multiple=64, dropout=0.0, logit_cap=0.1)
    model = GPT(config, layout(axis))
    initialize(model, seed=1)
    ids = torch.randint(61, (3, 8), generator=torch.Generator().manual_seed(0))
    gradients = []
    for loss in (
        model(ids[:, :-1], ids[:, 1:]),
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()),
    ):
        (3 * loss).backward()
        gradients.append([loss.detach(), *(param.grad.clone() for param in model.parameters())])
        model.zero_grad()
    return max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("tensor_size", [1, 2])
def test_the_gradient_of_a_tied_weight_equals_that_of_whole_logits(tensor_size):
    cases = [(layout, torch.float64) for layout in LAYOUTS]
    for differences in run_cases(tensor_size, difference_of_gradients_of_a_model, cases):
        assert max(differences) < 1e-14


def test_the_loss_of_an_unknown_word_is_infinite():
    x, weight, targets = head(61)
    x.requires_grad_()
    for word in (61, NUM_WORDS - 1, NUM_WORDS):
        targets[5] = word
        loss = linear_cross_entropy(x, weight, targets, 61, ONE_DEVICE)
        assert loss.isinf()
        (gradient,) = torch.autograd.grad(loss, x)
        assert gradient[5].isnan().all(), "so that the step is skipped"


def test_without_targets_the_loss_is_nan_and_the_gradient_is_zero():
    x, weight, targets = head(61)
    loss = linear_cross_entropy(x.requires_grad_(), weight, targets.fill_(-1), 61, ONE_DEVICE)
    assert loss.isnan()
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.eq(0).all()


def test_a_second_derivative_is_refused():
    x, weight, targets = head(61)
    loss = linear_cross_entropy(x.requires_grad_(), weight, targets, 61, ONE_DEVICE)
    with pytest.raises(RuntimeError, match="compute the loss from the logits"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_rows_are_not_changed_by_their_log_sums(dtype):
    logits = torch.randn(4, 7).to(dtype)
    before = logits.clone()
    for softmax in (Softmax(), *OPTIONS):
        softmax.run(log_sums, logits)
        capped(logits, softmax.cap)
        assert logits.equal(before)


def test_without_gradients_a_z_loss_changes_nothing():
    x, weight, targets = head(61)
    with torch.no_grad():
        losses = [linear_cross_entropy(x, weight, targets, 61, ONE_DEVICE, softmax=Softmax(z_loss=z)) for z in (0, 1)]
    assert losses[0].equal(losses[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_loss_is_stable_in_half_precision(dtype):
    """The exponentials of these logits overflow; sums are in fp32, so the loss is that of the rounded logits."""
    logits = (torch.randn(16, 64) * 3000).to(dtype)
    targets = logits.argmax(-1)
    targets[::2] = torch.randint(64, (8,))
    x = torch.eye(16, dtype=dtype, requires_grad=True)
    loss = linear_cross_entropy(x, logits.t(), targets, 64, ONE_DEVICE)
    loss.backward()
    assert loss.item() == pytest.approx(F.cross_entropy(logits.double(), targets).item(), rel=1e-6)
    assert x.grad.dtype == dtype
    assert x.grad.isfinite().all()


def gradients_through_whole_logits(x: Tensor, weight: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight by way of a gradient of all logits in their dtype, normalised at once."""
    logits = (x @ weight.t()).to(torch.promote_types(x.dtype, torch.float32))
    probabilities = (logits - logits.logsumexp(-1, keepdim=True)).exp_()
    grad = (probabilities - F.one_hot(targets, len(weight))).mul_(scale / len(x)).to(x.dtype)
    return grad @ weight, grad.t() @ x


def gradients(x: Tensor, weight: Tensor, targets: Tensor, scale: float, **options: object) -> tuple[Tensor, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = linear_cross_entropy(x, weight, targets, len(weight), ONE_DEVICE, **options)
    (loss * scale).backward()
    return x.grad, weight.grad


def errors_and_zeros(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    pairs = list(zip(found, exact, strict=True))
    errors = [((own.double() - right).norm() / right.norm()).item() for own, right in pairs]
    return errors + [own.eq(0).sum().item() for own, _ in pairs]


def test_gradients_in_fp16_are_as_exact_as_through_whole_logits():
    """The loss scale comes before the division by the number of tokens is rounded."""
    num_tokens, scale = 8192, 2.0**16
    x, weight, _ = head(64, torch.float16, num_tokens)
    targets = torch.randint(NUM_WORDS, (num_tokens,), generator=torch.Generator().manual_seed(0))
    exact = gradients_through_whole_logits(x.double(), weight.double(), targets, scale)
    expected = errors_and_zeros(gradients_through_whole_logits(x, weight, targets, scale), exact)
    for chunk_tokens in (num_tokens, 2048):
        announced = {"loss_scale": torch.tensor(scale), "softmax": Softmax(chunk_tokens=chunk_tokens)}
        found = errors_and_zeros(gradients(x, weight, targets, scale, **announced), exact)
        # Sums in another order round other elements: 1% of the error.
        assert all(own <= 1.01 * other for own, other in zip(found, expected, strict=True))
    not_announced = errors_and_zeros(gradients(x, weight, targets, scale), exact)
    assert not_announced[0] > 2 * expected[0]
