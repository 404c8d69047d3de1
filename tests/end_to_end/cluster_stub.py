"""Stands for the programs of a cluster, and for those that need a network: checks how it is called.

The test of the documents links it under each of their names. One node of the cluster is half a rank of this machine.
"""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import yaml


def sbatch(words: list[str]) -> None:
    """Run the script with the variables of a job; a job of 2 N nodes is one node with N ranks here."""
    options, (script, *arguments) = split(words, "--nodes=", "--gpus-per-node=", "--ntasks-per-node=")
    nodes = int(dict(option.split("=") for option in options)["--nodes"])
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    job |= {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "RANKS_PER_NODE": str(max(nodes // 2, 1))}
    assert script.endswith(".sbatch")
    os.execve(script, [script, *arguments], os.environ | job)


def srun(words: list[str]) -> None:
    container = ("--container-image=", "--container-name=", "--container-mounts=", "--container-workdir=")
    step = (
        "--export=ALL",
        "--kill-on-bad-exit=1",
        "--wait=",
        "--cpu-bind=none",
        "--cpus-per-task=",
        "--ntasks=",
        "--ntasks-per-node=",
    )
    _, command = split(words, *step, "--label", *container)
    os.execvp(command[0], command)


def scontrol(words: list[str]) -> None:
    assert words[:2] == ["show", "hostnames"]
    sys.stdout.write(words[2] + "\n")


def ssh(words: list[str]) -> None:
    _, (_host, command) = split(words, "-tt", "-o", "BatchMode=yes", "ConnectTimeout=", "ServerAlive")
    os.execvp("bash", ["bash", "-c", command])


def python_of_a_node(words: list[str]) -> None:
    """Stand for the interpreter of one of several nodes: check the settings instead of starting ranks."""
    from gpt.settings.parser import parse_settings  # takes seconds, and the other stubs do not need it

    if words[:2] == ["-m", "parallel.launch.route"]:
        sys.stdout.write("1 10.0.0.1 ib0\n")
    elif words[:2] == ["-m", "gpt.preflight"]:
        assert words[2:4] == ["--nodes", os.environ["NNODES"]]
        parse_settings(words[words.index("--") + 1 :])
    else:
        assert words[:2] == ["-m", "parallel.launch"]
        parse_settings(words[words.index("pretrain_gpt.py") + 1 :])


def docker(words: list[str]) -> None:
    if words[0] == "push":
        return
    command, *options, folder = words
    named = dict(zip(options[::2], options[1::2], strict=True))
    assert (command, set(named)) == ("build", {"--file", "--tag"})
    assert Path(folder).is_dir()
    assert Path(named["--file"]).read_text().count("\nFROM ") == 1


def kubectl(words: list[str]) -> None:
    assert words[:2] == ["apply", "-f"]
    assert yaml.safe_load(Path(words[2]).read_text())["kind"] == "PyTorchJob"


def pip(words: list[str]) -> None:
    assert words[0] == "install"
    assert all(re.fullmatch(r"[a-z_]+", name) for name in words[1:])


def wandb(words: list[str]) -> None:
    if words[0] == "agent":
        return
    command, _project, _name, path = words
    assert command == "sweep"
    assert {"command", "metric", "parameters"} < yaml.safe_load(Path(path).read_text()).keys()


def lm_eval(words: list[str]) -> None:
    named = dict(zip(words[::2], words[1::2], strict=True))
    assert set(named) == {"--model", "--model_args", "--tasks", "--batch_size"}
    open_folder(named["--model_args"].removeprefix("pretrained="))


def vllm(words: list[str]) -> None:
    command, folder, limit, tokens = words
    assert (command, limit) == ("serve", "--max-model-len")
    assert int(tokens) <= open_folder(folder)


def open_folder(folder: str) -> int:
    """Return the positions of an exported model, which must have weights and a tokenizer."""
    assert list(Path(folder).glob("*.safetensors"))
    assert (Path(folder) / "tokenizer.json").is_file()
    return json.loads((Path(folder) / "config.json").read_text())["n_positions"]


def split(words: list[str], *known: str) -> tuple[list[str], list[str]]:
    """Return (the options before the first other word, the rest); an option that is not known is an error."""
    for number, word in enumerate(words):
        if not word.startswith(known):
            assert not word.startswith("-"), f"unknown option {word}"
            return words[:number], words[number:]
    raise AssertionError("no command")


STUBS = (sbatch, srun, scontrol, ssh, python_of_a_node, docker, kubectl, pip, wandb, lm_eval, vllm)

if __name__ == "__main__":
    name, arguments = Path(sys.argv[1]).name, sys.argv[2:]
    sys.stderr.write(f"stub: {shlex.join([name, *arguments])}\n")
    next(stub for stub in STUBS if stub.__name__ == name)(arguments)
