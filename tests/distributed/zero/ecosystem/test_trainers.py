"""The classes of docs/trainers.md, by which the loops of other libraries train on 2 ranks as one process does."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from tests.ranks import run_ranks
from tests.scenarios import WIDTH, Blocks
from tests.source_files import ROOT
from zero import ZeroConfig, ZeroOptimizer

LR, NUM_STEPS, NUM_MICRO_BATCHES, ROWS = 1e-2, 3, 2, 2


def class_of(heading: str) -> Any:
    """Return the class that the page has below a heading."""
    section = (ROOT / "docs/trainers.md").read_text().split(f"\n## {heading}\n")[1]
    namespace: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", section, re.S)[1], namespace)  # type: ignore[index]
    (found,) = (v for v in namespace.values() if isinstance(v, type) and v.__module__ == "builtins")
    return found


class Tokens(Dataset):
    def __len__(self) -> int:
        return 2 * NUM_STEPS * NUM_MICRO_BATCHES * ROWS

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids}


def gpt() -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "n_layer": 2,
        "n_embd": 16,
        "n_head": 2,
        "vocab_size": 50,
        "n_positions": 8,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def forget_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train_by_trainer(
    kind: Any, folder: Path, steps: int, options: dict[str, Any] | None = None, **settings: Any
) -> tuple[dict[str, Tensor], float]:
    """Return the weights and the loss of an evaluation."""
    forget_accelerate()
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=NUM_MICRO_BATCHES,
        num_train_epochs=1,
        max_grad_norm=0.5,
        learning_rate=LR,
        weight_decay=0.1,
        adam_epsilon=1e-3,  # a gradient whose rounding is another changes no sign
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **(options or {}),
    )
    trainer = kind(gpt(), arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    trainer.train(**settings)
    assert trainer.state.global_step == steps
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(folder / "last")
    dist.barrier()
    return GPT2LMHeadModel.from_pretrained(folder / "last").state_dict(), loss


def check_trainer(folder: Path) -> None:
    from transformers import Trainer

    zero_trainer = class_of("Transformers' Trainer")
    expected = train_by_trainer(Trainer, folder / "plain", NUM_STEPS)
    for stage in (0, 1, 2, 3):
        zero_trainer.zero_config = ZeroConfig(stage)
        own = folder / str(stage)
        for settings in ({}, {"resume_from_checkpoint": str(own / "checkpoint-2")}):
            found = train_by_trainer(zero_trainer, own, NUM_STEPS, **settings)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    best |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # that of the first step
    expected = train_by_trainer(Trainer, folder / "plain-best", NUM_STEPS, best)
    found = train_by_trainer(zero_trainer, folder / "best", NUM_STEPS, best)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    forget_accelerate()


def test_the_trainer_of_transformers_trains_as_with_distributed_data_parallel(tmp_path: Path):
    pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    run_ranks(2, check_trainer, tmp_path)


def loss_of(output: Tensor) -> Tensor:
    return (output - 0.5).square().mean()


def batches() -> list[Tensor]:
    """Return the micro-batches of all steps, each with the rows of two ranks."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(NUM_STEPS * NUM_MICRO_BATCHES, 2 * ROWS, WIDTH, generator=generator, dtype=torch.float64))


def trained_by_torch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Blocks()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    for number, x in enumerate(batches()):
        (loss_of(module(x)) / NUM_MICRO_BATCHES).backward()
        if number % NUM_MICRO_BATCHES:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return module.state_dict()


def check_on_first_rank(state: dict[str, Tensor]) -> None:
    if dist.get_rank() == 0:
        torch.testing.assert_close(state, trained_by_torch(), rtol=1e-10, atol=1e-10)


def check_accelerate() -> None:
    torch.set_default_dtype(torch.float64)
    for stage in (0, 1, 2, 3):
        forget_accelerate()
        torch.manual_seed(0)
        accelerator = class_of("Accelerate")(
            ZeroConfig(stage), 0.5, cpu=True, gradient_accumulation_steps=NUM_MICRO_BATCHES
        )
        module = Blocks()
        rows = torch.utils.data.TensorDataset(torch.cat(batches()))
        model, optimizer, loader = accelerator.prepare(
            module, torch.optim.AdamW(module.parameters(), lr=LR), DataLoader(rows, ROWS)
        )
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(x)))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        assert accelerator.unwrap_model(model) is module
        check_on_first_rank(accelerator.get_state_dict(model))
    forget_accelerate()


def test_accelerate_trains_as_one_process():
    pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    run_ranks(2, check_accelerate)


def check_lightning(folder: Path) -> None:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = Blocks()

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return loss_of(self.inner(batch[0]))

        def configure_optimizers(self) -> Any:
            return ZeroOptimizer(self.trainer.strategy.model, torch.optim.AdamW, lr=LR, clip_norm=0.5)

    torch.set_default_dtype(torch.float64)
    for stage in (0, 1, 2, 3):
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=class_of("Lightning")(ZeroConfig(stage)),
            accumulate_grad_batches=NUM_MICRO_BATCHES,
            max_epochs=1,
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        own = torch.cat([x.chunk(2)[dist.get_rank()] for x in batches()])
        trainer.fit(Module(), DataLoader(torch.utils.data.TensorDataset(own), ROWS))
        saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)["state_dict"]
        check_on_first_rank({name.removeprefix("inner."): value for name, value in saved.items()})


def test_lightning_trains_as_one_process(tmp_path: Path):
    pytest.importorskip("lightning", reason="the package lightning is not installed")
    run_ranks(2, check_lightning, tmp_path)
