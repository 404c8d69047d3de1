"""A run goes on with torch's AdamW where apex's was in use, and the reverse.

Apex cannot be installed without a CUDA compiler and a GPU. So a stand-in with its interface is used: its names of
states and groups, and a counter of steps for each group. It updates by torch's kernel, so that losses can be equal to
the bit; it says nothing about apex's arithmetic.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gpt.builder.train_state import choose_adam
from gpt.run_folder.files import read_steps
from gpt.settings.parser import parse_settings
from parallel.validation.errors import ConfigError
from parallel.world import start_world
from pretrain_gpt import pretrain
from tests.end_to_end.runs import options, run
from tests.ranks import run_ranks
from zero.chosen import homes_of
from zero.settings.config import NO_OFFLOAD, OffloadConfig

CPU = torch.device("cpu")


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ):
        assert adam_w_mode
        settings = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, settings | {"weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros(2, *param.shape)
                torch._fused_adamw_(
                    [param],
                    [param.grad],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [torch.tensor(float(group["step"]))],
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=False,
                )


def resume_in_turn(runs: list[list[str]]) -> list[tuple[float, float]]:
    """Start the program again and again; return the losses and norms of all steps."""
    with mock.patch("gpt.builder.train_state.find_apex", return_value=FusedAdam):
        for arguments in runs:
            settings = parse_settings(arguments)
            pretrain(settings, start_world())
            torch.distributed.destroy_process_group()
    return [(record["loss"], record["grad_norm"]) for record in read_steps(Path(settings.run.dir))]


def test_a_run_resumes_by_the_other_implementation_and_with_offload(corpus, tmp_path):
    settings: dict[str, Any] = {"checkpoint__every": 2, "schedule__decay": "constant"}
    one = run(2, corpus, tmp_path / "one", **settings)
    implementations = [("apex", "accelerator"), ("torch", "host"), ("apex", "accelerator")]
    runs = [
        options(
            corpus,
            tmp_path / "turns",
            optimizer__implementation=implementation,
            offload__mode=mode,
            **settings | {"train__steps": steps},
        )
        for steps, (implementation, mode) in zip((2, 4, 6), implementations, strict=True)
    ]
    found = run_ranks(2, resume_in_turn, runs, init_process_group=False)[0]
    assert found == [(record["loss"], record["grad_norm"]) for record in one]


def test_torchs_is_the_default_and_apexs_is_refused_where_it_cannot_work():
    assert choose_adam("torch", homes_of(NO_OFFLOAD, CPU))[:2] == (torch.optim.AdamW, {"fused": True})
    with pytest.raises(ConfigError, match=r"implementation=apex: FusedAdam does not work on cpu; .*=torch"):
        choose_adam("apex", homes_of(NO_OFFLOAD, CPU))
    with mock.patch("gpt.builder.train_state.find_apex", return_value=FusedAdam):
        assert choose_adam("torch", homes_of(NO_OFFLOAD, CPU))[0] is torch.optim.AdamW
        assert choose_adam("apex", homes_of(NO_OFFLOAD, CPU))[0] is FusedAdam
        with pytest.raises(ConfigError, match="cannot update states in host memory"):
            choose_adam("apex", homes_of(OffloadConfig("host"), CPU))
