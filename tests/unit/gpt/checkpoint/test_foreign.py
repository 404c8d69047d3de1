"""Checkpoints of DCP and DeepSpeed from which a run resumes: what is said of them, what is refused, what is damaged."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from gpt.checkpoint.checkpoint import load
from gpt.checkpoint.folder import find
from gpt.checkpoint.layout import Progress
from parallel.validation.errors import ConfigError
from tests.oracle.deepspeed_files import write_deepspeed
from tests.unit.gpt.checkpoint.runs import tiny_state, train_step
from tests.unit.zero.dcp.test_folders import assert_one_line_if_damaged
from zero import DistributedState, full_state_dict

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(folder: Path, **more: torch.Tensor) -> Any:
    """Save a run of two steps by DCP, and return its state."""
    state = tiny_state()
    for seed in range(2):
        train_step(state, seed)
    content = DistributedState(state.model, state.optimizer).state_dict()
    content["model"] |= more
    dcp.save({"app": content}, checkpoint_id=folder, no_dist=True)
    return state


def save_by_deepspeed(folder: Path) -> None:
    module = tiny_state().model.unwrap()
    optimizer = torch.optim.AdamW(module.parameters())
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    write_deepspeed(folder, 2, 2, module, optimizer)


def test_a_run_of_this_gpt_goes_on_and_a_line_says_where_in_the_data(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    saved, state = save(tmp_path / "dcp"), tiny_state(seed=5)
    assert find(tmp_path, str(tmp_path / "dcp")) == tmp_path / "dcp"
    progress = load(tmp_path / "dcp", state, samples_before=lambda step: 8 * step)
    assert progress == Progress(2, 16)
    for one in (saved, state):
        train_step(one, 7)
    expected = full_state_dict(saved.model)
    assert all(tensor.equal(expected[name]) for name, tensor in full_state_dict(state.model).items())
    save_by_deepspeed(tmp_path / "deepspeed")
    assert load(tmp_path / "deepspeed", state) == Progress(3, 12)
    of_dcp, of_deepspeed = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert of_dcp.endswith("at sample 16, where 2 steps of this run would end")
    assert of_deepspeed.endswith("at sample 12, as many as it has read")


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path):
    save(tmp_path / "more", extra=torch.zeros(3))
    save(tmp_path / "saved")
    save(tmp_path / "nan", **{"final_norm.weight": torch.full((8,), torch.nan)})
    dcp.save({"model": torch.nn.Linear(2, 2).state_dict()}, checkpoint_id=tmp_path / "linear", no_dist=True)
    for name, model, error in (
        ("more", {}, "has 'extra', which is no parameter of this model"),
        ("nan", {}, r"has values of final_norm.weight that are not finite; choose an earlier"),
        ("saved", {"mlp_width": 16}, r"mlp\.up\.weight is \[32, 8\] there and \[16, 8\] here"),
        ("linear", {}, r"has 0 tensors whose names end in transformer\.wte\.weight"),
        ("linear", {"mup_base_width": 4}, r"has no token_embedding\.weight, and no names .*mup_base_width=4"),
    ):
        with pytest.raises(ConfigError, match=error):
            load(tmp_path / name, tiny_state(**model))


@pytest.mark.full
@pytest.mark.parametrize("save_one", [save, save_by_deepspeed])
def test_a_damaged_folder_is_an_error_of_one_line(tmp_path: Path, save_one: Any):
    save_one(tmp_path / "saved")
    state = tiny_state()
    assert_one_line_if_damaged(tmp_path / "saved", 1000, lambda folder: load(folder, state))
