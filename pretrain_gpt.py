"""Train a GPT: settings -> world -> mesh -> data -> model and ZeRO -> trainer.

Run it with `python` for one process, or with `torchrun` for several:

torchrun --nproc_per_node=2 pretrain_gpt.py --config configs/quickstart.yaml --zero.stage 1
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    gc.disable()  # what is imported stays: looking for garbage among it would take a fifth of the start
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until training handles it, Ctrl-C ends the process at once and without a traceback: there is nothing to save.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch

from data.errors import DataError
from gpt.builder.host_memory import check_host_memory
from gpt.builder.train_state import build, build_mesh, num_adding_units, start_options
from gpt.checkpoint.folder import find_to_train
from gpt.corpus import Corpus
from gpt.monitor.console import RunConsole, describe_run, memory_table, start_logging
from gpt.monitor.out_of_memory import out_of_memory_recorded
from gpt.monitor.watch import Watch
from gpt.pretrained.tokenizer_files import check_same_tokenizer
from gpt.run_folder.files import CHECKPOINTS
from gpt.settings.option_names import messages_in_option_names
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from gpt.trainer import Trainer
from parallel.mesh import Mesh
from parallel.store import Decisions
from parallel.torch_internals import multiplies_in_bf16
from parallel.world import World, exit_as_rank, rank_from_environment, start_world

logger = logging.getLogger(__name__)

# The arguments are the folder of the code, which is found wherever the process was started, a module and its arguments.
RUN_MODULE = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
Watching = Callable[[torch.device], AbstractContextManager[Any]]


@messages_in_option_names()
def pretrain(settings: Settings, world: World, watching: Watching = nullcontext) -> None:
    """Train a model as the settings say, inside the context `watching(device)`. All ranks call it."""
    console = RunConsole(is_quiet=not world.is_first)
    mesh = build_mesh(settings, world)
    watch = Watch(settings, world, mesh.log)
    with watch.running():
        _pretrain(settings, world, mesh, watch, console, watching)


def _pretrain(
    settings: Settings, world: World, mesh: Mesh, watch: Watch, console: RunConsole, watching: Watching
) -> None:
    check_host_memory(settings, mesh, world)
    train = settings.train
    best = "bf16" if multiplies_in_bf16(world.device) else "fp32"
    if world.device.type == "cpu" and train.precision not in ("fp32", best):
        logger.warning("train.precision=%s is slow on this CPU; choose %s", train.precision, best)
    corpus = Corpus.open(settings.data, settings.model, train, mesh, world, num_adding_units(settings, mesh))
    state = trainer = None
    with (
        watching(world.device),
        out_of_memory_recorded(settings, world, lambda: state, lambda: trainer.num_steps_done if trainer else 0),
    ):
        initial = settings
        if train.initial_weights is not None:
            found = find_to_train(Path(settings.run.dir) / CHECKPOINTS, settings.checkpoint.resume) is not None
            if Decisions(mesh.rank, mesh.size).decide(found, any):  # it is loaded, and the weights may be gone
                initial = settings.without_initial_weights()
            else:
                check_same_tokenizer(Path(train.initial_weights), corpus.tokenizer)
        state = build(initial, mesh, world.device)
        console.say(describe_run(state, train, settings.run.dir))
        console.show(memory_table(state, train))
        trainer = Trainer(settings, world, state, corpus, console, watch)
        trainer.train()


def replace_process(module: str, arguments: Sequence[str]) -> NoReturn:
    """Run a module with `arguments` in place of this process, with its pid, environment and standard streams."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-c", RUN_MODULE, str(Path(__file__).parent), module, *arguments])


def main(watching: Watching | None = None) -> None:
    """Train as the command line says; what dry runs and checks of streams need runs in the laboratory instead."""
    with exit_as_rank(DataError):
        console = RunConsole(is_quiet=rank_from_environment() > 0)
        settings = parse_settings(sys.argv[1:], show=console.show)
        if settings.dry_run.world_size is not None:
            replace_process("lab.dryrun", sys.argv[1:])
        if settings.profile.check_streams and watching is None:
            replace_process("lab.races", sys.argv[1:])
        with messages_in_option_names():
            world = start_world(start_options(settings))
        logging.raiseExceptions = False  # a log on a full disk is no reason to print a traceback for each of its lines
        start_logging(world.is_first)
        pretrain(settings, world, watching or nullcontext)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    main()
