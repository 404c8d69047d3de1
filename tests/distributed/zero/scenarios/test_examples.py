"""The excerpts of docs/zero_library.md and docs/migration.md, which train as they do in plain torch.

In one process, `ZeroDataParallel` and `ZeroOptimizer` stand for a plain module and a plain optimizer.
"""

import ast
import importlib
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from parallel.mesh import Axis
from tests.distributed.zero import test_optimizer_lists
from tests.distributed.zero.compiled import test_modules
from tests.documents import blocks
from tests.pairwise import noting
from tests.scenarios import Blocks, Run, as_test, cases
from tests.source_files import ROOT
from zero.checkpoint.export import full_state_dict
from zero.uneven import join

EXCERPTS = [
    block.text
    for page in ("zero_library.md", "migration.md")
    for block in blocks(ROOT / "docs" / page)
    # Others are programs, or loops that tests/distributed/zero/ecosystem has.
    if block.language == "python" and not block.text.startswith(("import", "from", "#"))
]


def names_read(program: str) -> set[str]:
    """Return the names that a program reads before it assigns them."""
    names = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Name)]
    first: dict[str, ast.expr_context] = {}
    for name in sorted(names, key=lambda name: (name.lineno, name.col_offset)):
        first.setdefault(name.id, name.ctx)
    return {name for name, context in first.items() if isinstance(context, ast.Load)}


def loss_of(output: Tensor) -> Tensor:
    return (output - 0.5).square().mean()


def run_excerpt(run: Run, program: str) -> None:
    """Run an excerpt, with the models and optimizers that it reads."""
    torch.manual_seed(0)
    read = names_read(program)
    context: dict[str, Any] = {
        "torch": torch,
        "F": F,
        "AveragedModel": AveragedModel,
        "get_ema_multi_avg_fn": get_ema_multi_avg_fn,
        "join": join,
        "module": Blocks(),
        "batches": [run.batch(step) for step in range(3)],
        "noise": [run.batch(step) for step in range(3)],
        "real": [run.batch(10 + step)[:, :2] for step in range(3)],
        "scores": [],
        "state": Blocks().state_dict(),
        "loss_of": loss_of,
        "real_loss": lambda logits: F.softplus(-logits).mean(),
        "fake_loss": lambda logits: F.softplus(logits).mean(),
        "data": Axis.trivial("data") if run.is_plain else run.data,
        "config": run.configuration,
        "full_state_dict": (lambda model: model.module.state_dict()) if run.is_plain else full_state_dict,
        "ZeroDataParallel": lambda module, data, config: run.wrap(module),
        "ZeroOptimizer": run.optimizer,
    }
    if "model" in read:
        context["model"] = run.wrap(context["module"])
    if "optimizer" in read:
        context["optimizer"] = run.optimizer(context["model"])
    if "generator" in read:
        discriminator = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
        context |= {"generator": run.wrap(Blocks()), "discriminator": run.wrap(discriminator)}
        context |= {f"optimize_{name}": run.optimizer(context[name]) for name in ("generator", "discriminator")}
    exec(program, context)
    if "backward" not in program:
        run.train(context["model"], run.optimizer(context["model"]))
    for score in context["scores"]:
        run.record(score)


def run_excerpts(is_half_precision: bool, run: Run) -> None:
    for program in EXCERPTS:
        if ("bfloat16" in program) is is_half_precision:
            with noting(program):
                run_excerpt(run, program)


TABLE = {
    "examples": cases({"in full precision": partial(run_excerpts, False)})
    # A gradient of at most 1 is summed over other rows than in one process, each time rounded to 2**-8; so is a weight.
    | cases({"in half precision": partial(run_excerpts, True)}, dtype=torch.float32, tolerance=2**-6)
}

test_scenario = as_test(__name__, TABLE)


def test_all_examples_are_found():
    assert len(EXCERPTS) == 18
    assert names_read(EXCERPTS[-1]) >= {"module", "batches", "loss_of"}
    assert "model" not in names_read(EXCERPTS[-1])


def test_each_row_of_the_page_has_a_test_and_each_test_a_row():
    names = [f"{__package__}.{path.stem}" for path in Path(__file__).parent.glob("test_*.py")]
    modules = [*map(importlib.import_module, names), test_modules, test_optimizer_lists]
    tables = [getattr(module, "TABLE", {}) for module in modules]
    rows = Counter(row for table in tables for row in table)
    page = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "zero_library.md").read_text(), flags=re.MULTILINE)
    assert rows == Counter(set(page))
