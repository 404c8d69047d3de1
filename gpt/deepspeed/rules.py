"""Keys of a DeepSpeed configuration that make settings together, and the contradictions between them.

A rule reads what the file says and what stands beside it, and returns settings; it raises ConfigError with the numbers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parallel.errors import ConfigError


@dataclass(frozen=True)
class Surroundings:
    """The settings as they are without the file, by dotted names, those that the command line gives, and the ranks."""

    settings: Any
    options: frozenset[str]
    num_ranks: int

    def is_option(self, setting: str) -> bool:
        return any(f"{setting}.".startswith(f"{option}.") for option in self.options)

    @property
    def data_size(self) -> int:
        return max(1, self.num_ranks // self.settings["parallel.tensor_size"])


@dataclass
class Reading:
    """`values` are those of the keys that are mapped, by their names today; `autos` the keys that are left to the
    settings in so many words; `settings` what has come of all that so far.
    """

    beside: Surroundings
    values: dict[str, Any] = field(default_factory=dict)
    autos: set[str] = field(default_factory=set)
    settings: dict[str, Any] = field(default_factory=dict)

    def chosen(self, setting: str) -> Any:
        """What the setting will be: an option wins over the file, the file over the rest."""
        is_from_file = setting in self.settings and not self.beside.is_option(setting)
        return self.settings[setting] if is_from_file else self.beside.settings[setting]

    def named(self, key: str, setting: str) -> tuple[Any, str]:
        """(value, where it is said) of a key that says the same as one setting; None where nobody says it."""
        if self.beside.is_option(setting):
            value = self.beside.settings[setting]
            return value, f"--{setting}={value}"
        if key in self.autos:
            value = self.beside.settings[setting]
            return value, f"{setting}={value}"
        value = self.values.get(key)
        return value, f"{key}={value}"


Rule = Callable[[Reading], dict[str, Any]]


def precision(file: Reading) -> dict[str, Any]:
    """fp32 where the file switches off what it speaks of."""
    switches = {name: file.values[f"{name}.enabled"] for name in ("fp16", "bf16") if f"{name}.enabled" in file.values}
    on = [name for name, is_on in switches.items() if is_on]
    if len(on) == 2:
        raise ConfigError("fp16.enabled=true and bf16.enabled=true; switch one of them off")
    if on:
        return {"train.precision": on[0]}
    return {"train.precision": "fp32"} if switches and not file.autos & {"fp16.enabled", "bf16.enabled"} else {}


def types_of_gradients(file: Reading) -> dict[str, Any]:
    """Nothing but a check: there is one type, that of the parameters."""
    chosen = file.chosen("train.precision")
    for key in ("communication_data_type", "data_types.grad_accum_dtype", "data_types.param_dtype"):
        if (value := file.values.get(key, chosen)) != chosen:
            raise ConfigError(
                f"{key}={value} and train.precision={chosen}; parameters, gradients, their sums and messages have one "
                f"type; remove it or choose --train.precision={value}"
            )
    return {}


def loss_scale(file: Reading) -> dict[str, Any]:
    static, power = file.values.get("fp16.loss_scale", 0), file.values.get("fp16.initial_scale_power")
    if static:
        return {"train.loss_scale.dynamic": False, "train.loss_scale.initial": float(static)}
    made: dict[str, Any] = {"train.loss_scale.dynamic": True} if "fp16.loss_scale" in file.values else {}
    return made if power is None else made | {"train.loss_scale.initial": 2.0**power}


BATCH_KEYS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def batch(file: Reading) -> dict[str, Any]:
    """DeepSpeed's arithmetic between three sizes and the data-parallel ranks; where it lacks one, ours."""
    if not any(key in file.values for key in BATCH_KEYS):
        return {}
    total_key, micro_key, steps_key = BATCH_KEYS
    total, total_name = file.named(total_key, "train.global_batch_size")
    micro, micro_name = file.named(micro_key, "train.micro_batch_size")
    steps, num_ranks = file.values.get(steps_key), file.beside.data_size
    if total_key in file.autos and steps is not None and not file.beside.is_option("train.global_batch_size"):
        total = None  # the two others say what it must be
    if total is None and micro is None:
        micro = file.beside.settings["train.micro_batch_size"]
    sizes = {micro_name: micro, f"{steps_key}={steps}": steps, f"{num_ranks} data-parallel ranks": num_ranks}
    known = {name: size for name, size in sizes.items() if size}
    product = math.prod(known.values())
    if total is None:
        total = product
    if total != product and (len(known) == len(sizes) or total % product):
        relation = "" if len(known) == len(sizes) else "a multiple of "
        raise ConfigError(
            f"{total_name} is not {relation}{' x '.join(known)} = {product}; change one of them, or leave one out"
        )
    return {"train.micro_batch_size": micro or total // product, "train.global_batch_size": total}


def offload(file: Reading) -> dict[str, Any]:
    stage, chosen = file.chosen("zero.stage"), {}
    for section, state, lowest in (("offload_optimizer", "optimizer", 1), ("offload_param", "parameters", 3)):
        key = f"zero_optimization.{section}.device"
        if key not in file.values:
            continue
        chosen[state] = file.values[key] == "cpu"
        if chosen[state] and stage < lowest:
            raise ConfigError(
                f"{key}=cpu needs stage {lowest} or higher, and zero.stage={stage}; choose stage {lowest}, "
                "or none for the device"
            )
    if not chosen:
        return {}
    leaving = [state for state, leaves in chosen.items() if leaves]
    return {"offload.mode": "host", "offload.states": leaving} if leaving else {"offload.mode": "accelerator"}


DECAYS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
COS_MIN_RATIO = 1e-4  # DeepSpeed's default


def schedule(file: Reading) -> dict[str, Any]:
    """DeepSpeed's scheduler writes over the optimizer's learning rate."""
    made: dict[str, Any] = {}
    for key in ("optimizer.params.lr", "scheduler.params.warmup_max_lr"):
        if key in file.values:
            made["optimizer.lr"] = file.values[key]
    if kind := file.values.get("scheduler.type"):
        file.settings |= made
        ratio = file.values.get("scheduler.params.cos_min_ratio", COS_MIN_RATIO)
        made["schedule.decay"] = DECAYS[kind]
        made["schedule.min_lr"] = ratio * file.chosen("optimizer.lr") if kind == "WarmupCosineLR" else 0.0
    return made


def activations(file: Reading) -> dict[str, Any]:
    """Without tensor ranks there is nobody to divide checkpoints with."""
    if file.values.get("activation_checkpointing.cpu_checkpointing"):
        return {"activations.store": "partition_host"}
    if file.values.get("activation_checkpointing.partition_activations"):
        return {"activations.store": "partition" if file.chosen("parallel.tensor_size") > 1 else "keep"}
    return {}


RULES: tuple[Rule, ...] = (precision, types_of_gradients, loss_scale, batch, offload, schedule, activations)
