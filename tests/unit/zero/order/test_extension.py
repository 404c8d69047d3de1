"""Extensions are told of rounds, launches, gradients and updates, and may leave a backward out of a step."""

import pytest
import torch
from torch import Tensor, nn

from parallel.mesh import Axis
from zero import Extension, ZeroConfig, ZeroDataParallel, ZeroOptimizer
from zero.core.protocols.orders import Round


class Noting(Extension):
    """Notes what it is told; `uses` the gradients or not."""

    def __init__(self, *, uses: bool = True):
        self.uses, self.found = uses, []

    def on_round(self, following: Round) -> None:
        self.found.append(following.name)

    def on_launch(self, kind: str, number: int) -> None:
        self.found.append((kind, number))

    def on_backward(self) -> bool:
        self.found.append("backward")
        return self.uses

    def on_gradient(self, number: int, grad: Tensor) -> None:
        self.found.append((number, grad.tolist()))

    def before_update(self) -> None:
        self.found.append("before")

    def after_update(self) -> None:
        self.found.append("after")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_extension_is_told_rounds_launches_gradients_and_updates(stage):
    of_all, later, discarding = Noting(), Noting(), Noting(uses=False)
    module = nn.Linear(2, 1, bias=False)
    model = ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(stage), extensions=[of_all])
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=1.0)
    with model.gathered():
        before = module.weight.detach().clone()
    of_all.found.clear()
    for extension in (discarding, later):
        with model.extended(extension):
            model(torch.tensor([[1.0, 2.0]])).sum().backward()
    optimizer.step()
    assert discarding.found.count((0, [1.0, 2.0])) == later.found.count((0, [1.0, 2.0])) == 1
    assert of_all.found.count((0, [1.0, 2.0])) == of_all.found.count("backward") == 2
    assert "ACCUMULATION" in discarding.found
    assert ("reduce", 0) in later.found
    assert ("reduce", 0) not in discarding.found
    assert of_all.found[-3:] == ["STEP", "before", "after"]
    assert ("gather" in str(of_all.found)) is (stage == 3)
    with model.gathered():
        assert module.weight.equal(before - torch.tensor([[1.0, 2.0]]))
