"""Rules that determine settings from several keys of a DeepSpeed configuration, and refuse contradictory keys.

A rule takes the translation so far (`file`), with the values of the keys and the settings that they are combined with.
It returns settings by dotted names, or raises ConfigError with the values that contradict each other.
"""

import math
from collections.abc import Callable
from typing import Any

from gpt.deepspeed.translation import Translation
from parallel.validation.errors import ConfigError

Rule = Callable[[Translation], dict[str, Any]]


def precision(file: Translation) -> dict[str, Any]:
    """Return the precision that the file switches on; fp32 if it switches off every precision that it names."""
    switches = {name: file.values[f"{name}.enabled"] for name in ("fp16", "bf16") if f"{name}.enabled" in file.values}
    on = [name for name, is_on in switches.items() if is_on]
    if len(on) == 2:
        raise ConfigError("fp16.enabled=true and bf16.enabled=true; switch one of them off")
    if on:
        return {"train.precision": on[0]}
    is_left_open = file.is_auto("fp16.enabled") or file.is_auto("bf16.enabled")
    return {"train.precision": "fp32"} if switches and not is_left_open else {}


def parameter_type(file: Translation) -> dict[str, Any]:
    """Raise ConfigError if the type of the parameters differs from the precision; return no settings."""
    key, chosen = "data_types.param_dtype", file.chosen("train.precision")
    if (value := file.values.get(key, chosen)) != chosen:
        raise ConfigError(
            f"{key}={value} and train.precision={chosen}; parameters have the type of the computation; remove it or "
            f"choose --train.precision={value}"
        )
    return {}


def loss_scale(file: Translation) -> dict[str, Any]:
    """Return a constant loss scale if the file has one, else the settings of the dynamic loss scale that it has."""
    constant, power = file.values.get("fp16.loss_scale", 0), file.values.get("fp16.initial_scale_power")
    if constant:
        return {"train.loss_scale.dynamic": False, "train.loss_scale.initial": float(constant)}
    settings: dict[str, Any] = {"train.loss_scale.dynamic": True} if "fp16.loss_scale" in file.values else {}
    return settings if power is None else settings | {"train.loss_scale.initial": 2.0**power}


BATCH_KEYS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def batch(file: Translation) -> dict[str, Any]:
    """Return batch sizes: total = micro-batch x accumulation steps x data-parallel ranks, as DeepSpeed computes them.

    A size that the file leaves open follows from the others, or is that of the settings. Raise ConfigError if the sizes
    contradict each other.
    """
    if not any(key in file.values for key in BATCH_KEYS):
        return {}
    total_key, micro_key, steps_key = BATCH_KEYS
    total, total_source = file.value_and_source(total_key, "train.global_batch_size")
    micro, micro_source = file.value_and_source(micro_key, "train.micro_batch_size")
    steps, num_ranks = file.values.get(steps_key), file.num_batch_ranks
    if file.is_auto(total_key) and steps is not None and not file.is_option("train.global_batch_size"):
        total = None  # follows from the other two
    if total is None and micro is None:
        micro = file.base["train.micro_batch_size"]
    factors = {micro_source: micro, f"{steps_key}={steps}": steps, f"{num_ranks} data-parallel ranks": num_ranks}
    known = {source: size for source, size in factors.items() if size}
    product = math.prod(known.values())
    if total is None:
        total = product
    if total != product and (len(known) == len(factors) or total % product):
        relation = "" if len(known) == len(factors) else "a multiple of "
        raise ConfigError(
            f"{total_source} is not {relation}{' x '.join(known)} = {product}; change one of them, or leave one out"
        )
    return {"train.micro_batch_size": micro or total // product, "train.global_batch_size": total}


def offload(file: Translation) -> dict[str, Any]:
    """Return the states that are offloaded to host memory. Raise ConfigError if the stage does not shard them."""
    stage, is_offloaded = file.chosen("zero.stage"), {}
    for section, state, lowest in (("offload_optimizer", "optimizer", 1), ("offload_param", "parameters", 3)):
        key = f"zero_optimization.{section}.device"
        if key not in file.values:
            continue
        is_offloaded[state] = file.values[key] == "cpu"
        if is_offloaded[state] and stage < lowest:
            raise ConfigError(
                f"{key}=cpu needs stage {lowest} or higher, and zero.stage={stage}; choose stage {lowest}, "
                "or none for the device"
            )
    if not is_offloaded:
        return {}
    states = [state for state, is_on_host in is_offloaded.items() if is_on_host]
    return {"offload.mode": "host", "offload.states": states} if states else {"offload.mode": "accelerator"}


def partition_groups(file: Translation) -> dict[str, Any]:
    """Return the groups that divide the parameters while all ranks divide the optimizer's states."""
    size = file.values.get("zero_optimization.zero_hpz_partition_size", 0)
    if size <= 1:
        return {}
    if (groups := file.values.get("zero_optimization.mics_shard_size", -1)) > 0:
        raise ConfigError(
            f"mics_shard_size={groups} and zero_hpz_partition_size={size}; the first divides all states over "
            "groups, the second the optimizer's over all ranks: remove one of them"
        )
    return {"parallel.shard_size": size, "zero.optimizer_over": "all"}


OPTIMIZER_NAMES = {"Adam": "adamw", "AdamW": "adamw", "Muon": "muon", "SGD": "sgd"}


def optimizer(file: Translation) -> dict[str, Any]:
    """Return the optimizer and its momentum. DeepSpeed's Muon adjusts rates as its authors do; SGD has no momentum."""
    kind, params = file.values.get("optimizer.type"), "optimizer.params"
    settings: dict[str, Any] = {} if kind is None else {"optimizer.name": OPTIMIZER_NAMES[kind]}
    if kind == "Muon":
        settings["optimizer.muon.adjust_lr"] = "original"
    if kind == "SGD":
        settings |= {"optimizer.momentum": 0.0, "optimizer.nesterov": False}
    for name in ("momentum", "nesterov"):
        if f"{params}.{name}" in file.values:
            settings[f"optimizer.{name}"] = file.values[f"{params}.{name}"]
    return settings


DECAYS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
COS_MIN_RATIO = 1e-4  # DeepSpeed's default


def schedule(file: Translation) -> dict[str, Any]:
    """Return the learning rate and its schedule. The scheduler's learning rate overrides the optimizer's."""
    settings: dict[str, Any] = {}
    for key in ("optimizer.params.lr", "optimizer.params.adam_lr", "scheduler.params.warmup_max_lr"):
        if key in file.values:
            settings["optimizer.lr"] = file.values[key]
    if kind := file.values.get("scheduler.type"):
        # Before `chosen` reads the learning rate, which may be one of these settings.
        file.settings |= settings
        ratio = file.values.get("scheduler.params.cos_min_ratio", COS_MIN_RATIO)
        settings["schedule.decay"] = DECAYS[kind]
        settings["schedule.min_lr"] = ratio * file.chosen("optimizer.lr") if kind == "WarmupCosineLR" else 0.0
    if muon_lr := file.values.get("optimizer.params.muon_lr"):
        file.settings |= settings
        settings["optimizer.muon.lr_factor"] = muon_lr / file.chosen("optimizer.lr")
    return settings


def activations(file: Translation) -> dict[str, Any]:
    """Return the activation store. Without tensor ranks, checkpoints cannot be partitioned and are kept whole."""
    if file.values.get("activation_checkpointing.cpu_checkpointing"):
        return {"activations.store": "partition_host"}
    if file.values.get("activation_checkpointing.partition_activations"):
        return {"activations.store": "partition" if file.chosen("parallel.tensor_size") > 1 else "keep"}
    return {}


# In this order: later rules read settings that earlier ones have made.
RULES: tuple[Rule, ...] = (
    precision,
    parameter_type,
    loss_scale,
    batch,
    offload,
    partition_groups,
    optimizer,
    schedule,
    activations,
)
