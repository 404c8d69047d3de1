"""Builds what trains from the settings: the mesh, the model, ZeRO around it, and its optimizer."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import nn

import zero
from gpt.builder.activation_store import chosen_activations
from gpt.builder.leaves import Leaves
from gpt.builder.loss_guard import LossGuard
from gpt.kernels.apex import choose_norm, find_apex
from gpt.kernels.attention import describe_attention, describe_documents
from gpt.kernels.norms import NORMS
from gpt.model.compiled_blocks import check_compiler, compile_blocks
from gpt.model.mup import hidden_factor, is_hidden_matrix
from gpt.model.transformer import GPT, Attention, initialize
from gpt.settings.optimizer import OptimizerSettings
from gpt.settings.schedule import check_batch_sizes, learning_rate
from gpt.settings.settings import Settings
from gpt.settings.training import LossScaleSettings, ParallelSettings, TrainSettings, check_evaluated
from gpt.shape.config import ModelConfig, check_divides
from parallel.memory_kinds import allocate_buffer
from parallel.mesh import Axis, Mesh
from parallel.tensor.context import check_context
from parallel.tensor.layers import part_of
from parallel.tensor.softmax import inductor_works
from parallel.tensor.split_parameters import split_dims
from parallel.tensor.token_layout import ReplicatedTokens, SplitTokens, TokenLayout
from parallel.torch_internals import options_of_exact_division
from parallel.validation.errors import ConfigError
from parallel.world import StartOptions, World
from zero.activations.checkpointed_blocks import ActivationsConfig, check_replicas, checkpointed_blocks, recomputed
from zero.chosen import blocks_of, levels_of
from zero.core.partition.stage import Lifetime
from zero.core.protocols.home import Homes
from zero.core.step.loss_scale import LossScale
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.sharded_init import ShardedInit
from zero.transports.block_sums import Blocks

logger = logging.getLogger(__name__)

Selects = Callable[[str, nn.Parameter], bool]  # whether a parameter with this name is selected
# Class, options and name for the log.
ChosenOptimizer = tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], str]


@dataclass(frozen=True)
class TrainState:
    """The mesh, the model, its optimizer and the loss guard: all that a training step changes or communicates over."""

    mesh: Mesh
    model: ZeroDataParallel
    optimizer: ZeroOptimizer
    device: torch.device
    activations: ActivationsConfig  # with the chosen store, if the settings say "auto"
    guard: LossGuard | None = None  # None if the settings do not ask for losses to be checked
    leaves: Leaves | None = None  # None unless runs are to be the same on any number of ranks

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
        gpt = self.model.module
        assert isinstance(gpt, GPT)
        return gpt.config

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next step, of which some parameters have a multiple."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)

    @property
    def num_parameters(self) -> int:
        """The number of parameters of this tensor rank: the paper's Psi."""
        return sum(param.numel() for flat in self.model.flats for param in flat.params)

    @property
    def num_coded_parameters(self) -> int:
        """The number of parameters of this tensor rank that are gathered in FP8."""
        return sum(param.numel() for flat in self.model.flats if flat.transport.is_lossy for param in flat.params)

    @property
    def num_parameters_of_model(self) -> int:
        """The number of parameters over all tensor ranks, with replicated parameters counted once."""
        num_split = sum(self.model.module.get_parameter(name).numel() for name in split_dims(self.model.module))
        return self.num_parameters + num_split * (self.mesh.tensor.size - 1)


def start_options(settings: Settings) -> StartOptions:
    """Return what the settings ask of the process of a rank."""
    # Stage 3 launches gathers ahead of the computation that is queued, and offload behind copies from the host: in a
    # single queue they would hold up what is launched after them.
    runs_ahead = settings.zero.policy.full_params is Lifetime.TRANSIENT or bool(settings.offload.offloaded_states)
    orders_launches = settings.parallel.tensor_size > 1 and not runs_ahead
    run = settings.run
    folder = Path(run.dir).absolute()
    return StartOptions(run.device, run.hang_seconds, orders_launches, folder, settings.train.is_same_on_any_layout)


def build_mesh(settings: Settings, world: World) -> Mesh:
    """Return the mesh of the run.

    Raises ConfigError if the settings and the ranks do not fit together, before anything is read or allocated.
    """
    check_tensor_groups(settings.parallel, world)
    mesh = Mesh.create(
        settings.parallel.tensor_size,
        world.device.type,
        shard_size=settings.parallel.shard_size,
        context_size=settings.parallel.context_size,
        imitated_backend=world.imitated_backend,
        allocate=allocate_buffer,
    )
    check_mesh(settings, mesh)
    # Both raise ConfigError: of a family that has no such model, and of a warm-up and a decay that overlap.
    if settings.checkpoint.weights:
        from gpt.pretrained.configuration import family_of

        family_of(settings.model)
    learning_rate(settings.schedule, settings.optimizer.lr, 0, settings.train.steps)
    return mesh


def check_mesh(settings: Settings, mesh: Mesh) -> None:
    """Raise ConfigError if the model or the batch cannot be divided over a mesh, whose axes need no groups."""
    check_divides(settings.model, mesh.tensor)
    check_replicas(settings.activations, token_layout(settings.parallel, mesh).replicas)
    check_batch_sizes(settings.train, mesh.num_batch_ranks)
    check_evaluated(settings.train, mesh.num_batch_ranks)
    blocks_on(settings, mesh.data).check()
    num_kv_heads, seq_length = max(1, settings.model.kv_heads // mesh.tensor.size), settings.model.seq_length
    sizes = {"heads of keys and values of a tensor rank": num_kv_heads, "tokens of a sequence": seq_length}
    check_context(mesh.context, sizes)
    num_tokens = settings.train.micro_batch_size * seq_length // mesh.context.size
    if settings.parallel.sequence_parallel:
        part_of(num_tokens, mesh.tensor, "the tokens of a micro-batch")


def num_adding_units(settings: Settings, mesh: Mesh) -> int:
    """Return the number of units, ranks or groups of them, that each have consecutive micro-batches of a step."""
    return blocks_on(settings, mesh.data).num_units


def blocks_on(settings: Settings, data: Axis) -> Blocks:
    """Return the blocks of micro-batches whose sums are added in a fixed order, if it is fixed."""
    inner, outer = levels_of(settings.zero.policy, data)
    return blocks_of(settings.zero, inner.size, outer.size)


def check_tensor_groups(settings: ParallelSettings, world: World) -> None:
    """Raise ConfigError if a tensor group (consecutive ranks) spans nodes although the settings do not allow it."""
    if world.local_size % settings.tensor_size == 0:
        return
    if not settings.tensor_across_nodes:
        raise ConfigError(
            f"parallel.tensor_size={settings.tensor_size} does not divide the {world.local_size} ranks of a node; "
            "choose one that does, or set parallel.tensor_across_nodes=true to send activations between nodes"
        )
    logger.warning(
        "tensor groups of %d ranks span nodes of %d: their activations are sent over the network, which is slow",
        settings.tensor_size,
        world.local_size,
    )


def token_layout(settings: ParallelSettings, mesh: Mesh) -> TokenLayout:
    """Return the layout of the residual stream's tokens over the tensor and the context ranks."""
    layout = SplitTokens if settings.sequence_parallel else ReplicatedTokens
    return layout(mesh.tensor, mesh.context)


def build(settings: Settings, mesh: Mesh, device: torch.device) -> TrainState:
    """Return a model with its initial values, sharded by ZeRO, and its optimizer. All ranks call it."""
    settings = settings.with_gradient_types(mesh.data.size).with_alignment()
    if settings.train.is_same_on_any_layout and device.type == "cuda":
        torch.use_deterministic_algorithms(True)  # torch refuses, by name, what has no such kernel
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision(settings.train.float32_matmul_precision)
    logger.info("products of fp32: %s precision", settings.train.float32_matmul_precision)
    train, tokens = settings.train, token_layout(settings.parallel, mesh)
    if train.compiles_blocks:
        check_compiler(device)
    activations = chosen_activations(settings, mesh, tokens.replicas, device)
    if settings.data.mask_documents:
        how = describe_documents(settings.model, device, train.dtype)
        logger.info("documents: kept apart by %s; FLOPs and MFU count one a sequence", how)
    with ShardedInit(mesh.data, settings.zero.policy, settings.zero.prefetch_numel, settings.offload) as init:
        sum_dtype = settings.zero.gradient_types(train.dtype).reduce
        if settings.zero.fixes_order:  # each gradient is summed by itself: of the same type in each stage
            sum_dtype = torch.promote_types(train.dtype, torch.float32)
        gpt = build_model(
            settings.model, activations, tokens, device, train.dtype, sum_dtype, is_compiled=train.compiles_blocks
        )
        if train.matmul == "fp8":
            _convert_to_fp8(gpt, train, mesh, device)
        gpt.softmax = replace(gpt.softmax, z_loss=train.z_loss)
        initialize(gpt, train.seed, mesh.data)
        if train.initial_weights is not None:
            from gpt.pretrained.weights import load_pretrained

            load_pretrained(gpt, Path(train.initial_weights))
    model = ZeroDataParallel(gpt, mesh.data, settings.zero, init=init, offload=settings.offload)
    if train.compiles_blocks:
        _compile(gpt, activations, settings)
    loss_scale = build_loss_scale(train.loss_scale, train.precision == "fp16", device)
    optimizer = build_optimizer(model, mesh.tensor, settings.optimizer, loss_scale)
    # After everything is built, because that draws random numbers too. Each data-parallel rank has its own stream of
    # random numbers for dropout.
    torch.manual_seed(train.seed + 1 + mesh.data.rank)
    leaves = Leaves(mesh.data, train.seed, num_adding_units(settings, mesh)) if train.is_same_on_any_layout else None
    # Their mean is the same on all ranks already.
    judging = mesh.data if leaves is None else mesh.data.without_peers()
    guard = LossGuard(judging, settings.guard.spike_factor, device) if settings.guard.checks_losses else None
    return TrainState(mesh, model, optimizer, device, activations, guard, leaves)


def _convert_to_fp8(gpt: GPT, train: TrainSettings, mesh: Mesh, device: torch.device) -> None:
    from gpt.builder.fp8_blocks import convert_blocks
    from zero.fp8.kernels import HOPPER, Device

    convert_blocks(gpt, train, HOPPER if mesh.data.imitated_backend == "nccl" else Device.of(device))


def _compile(gpt: GPT, activations: ActivationsConfig, settings: Settings) -> None:
    # Codes of weights must be those of eager code, which sends them.
    options = options_of_exact_division() if settings.train.matmul == "fp8" else None
    # Units that are named may be inside blocks, whose graphs then end at the hooks of these units.
    may_break = settings.zero.units is not None
    compile_blocks(gpt, activations.recomputes, may_break=may_break, options=options, budget=activations.budget)


def build_model(
    config: ModelConfig,
    activations: ActivationsConfig,
    tokens: TokenLayout,
    device: torch.device,
    dtype: torch.dtype,
    gradient_sum_dtype: torch.dtype | None = None,
    is_compiled: bool = False,
) -> GPT:
    """Return a GPT with parameters of `dtype`, which are not initialized yet.

    `gradient_sum_dtype` is the type in which gradients are summed along the tensor axis; None: `dtype`. `is_compiled`:
    `compile_blocks` follows, which cannot trace apex.
    """
    norm, norm_name = (NORMS[config.norm], "compiled") if is_compiled else choose_norm(config.norm, device)
    logger.info("norm: %s", norm_name)
    compiles_loss = inductor_works(device)
    logger.info("loss: %s", "compiled" if compiles_loss else "eager")
    if device.type == "cuda":
        logger.info("attention: %s", describe_attention(config, tokens.axis.size, device, dtype))
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            run_blocks = checkpointed_blocks(activations, tokens.replicas, device)
            gpt = GPT(config, tokens, run_blocks, norm, compiles_loss, gradient_sum_dtype)
    finally:
        torch.set_default_dtype(default_dtype)
    if activations.store == "selective":
        for module in gpt.modules():
            if isinstance(module, Attention):
                module.kernel = recomputed(module.kernel)
    return gpt


def build_loss_scale(settings: LossScaleSettings, is_fp16: bool, device: torch.device) -> LossScale:
    """Return the loss scale that the settings describe if the precision is fp16, else a constant scale of 1."""
    if not is_fp16:
        return LossScale(device=device)
    return LossScale(
        settings.initial,
        is_dynamic=settings.dynamic,
        minimum=settings.minimum,
        growth_interval=settings.growth_interval,
        hysteresis=settings.hysteresis,
        device=device,
    )


def build_optimizer(
    model: ZeroDataParallel, tensor: Axis, settings: OptimizerSettings, loss_scale: LossScale
) -> ZeroOptimizer:
    """Return the optimizer over the shards of the model."""
    assert isinstance(model.module, GPT)
    chosen, options, name = choose_optimizer(settings, model.homes)
    updates = OPTIMIZERS[settings.name]
    own = parameter_groups(model.module, settings, updates)
    rest = parameter_groups(model.module, settings, lambda name, param: not updates(name, param))
    optimizers = [chosen(own, lr=settings.lr, **options)] if own else []
    if rest:
        optimizers.append(zero.CautiousAdamW(rest, lr=settings.lr, **_adam_options(settings)))
    logger.info("optimizer: %s", name)
    return ZeroOptimizer(
        model,
        optimizers,
        tensor=tensor,
        clip_norm=settings.clip_norm,
        loss_scale=loss_scale,
        max_skipped_in_a_row=None,  # guard.max_skipped_steps is the limit, and the metrics report skipped steps
        warn_skipped=False,
    )


def _is_matrix(_name: str, param: nn.Parameter) -> bool:
    return param.dim() > 1


def _is_any(_name: str, _param: nn.Parameter) -> bool:
    return True


def parameter_groups(module: GPT, settings: OptimizerSettings, selects: Selects = _is_any) -> list[dict[str, Any]]:
    """Return groups of selected parameters, with weight decay for parameters of two or more dimensions only.

    Those whose learning rate is not that of the schedule are in groups with its factor, lr_scale, and those whose heads
    are matrices in groups with per_repetition=True.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, param in module.named_parameters():
        if param.requires_grad and selects(name, param):
            factor = hidden_factor(name, param, module.config)
            scale = factor * (settings.embedding_lr_factor if name == "token_embedding.weight" else 1.0)
            # AdamW multiplies the decay by the learning rate: with muP, it stays that of the base width.
            of_group: dict[str, Any] = {"weight_decay": settings.weight_decay / factor if param.dim() > 1 else 0.0}
            if settings.name == "muon" and settings.muon.per_head and ".qkv." in name and _is_matrix(name, param):
                of_group["per_repetition"] = True
            if scale != 1:
                of_group |= {"lr": settings.lr * scale, "lr_scale": scale}
            key = param.dim() > 1, *of_group.items()  # the same groups without decay, as checkpoints have them
            groups.setdefault(key, {"params": []} | of_group)["params"].append(param)
    return list(groups.values())


OPTIMIZERS: dict[str, Selects] = {
    "adamw": _is_any,
    "adamw8bit": _is_matrix,
    "adamw_bf16": _is_matrix,
    "muon": is_hidden_matrix,
    "soap": is_hidden_matrix,
    "sgd": _is_any,
}
"""By the name in the settings, which parameters are updated by it, and not by AdamW."""


def choose_optimizer(settings: OptimizerSettings, homes: Homes) -> ChosenOptimizer:
    """Return (class, options, name for the log) of the optimizer of the settings."""
    adam = _adam_options(settings)
    cautious = {"cautious_decay": settings.cautious_decay}
    with_momentum = {"momentum": settings.momentum, "nesterov": settings.nesterov}
    match settings.name:
        case "adamw" if settings.cautious_decay:
            return zero.CautiousAdamW, adam, "fused AdamW with cautious weight decay"
        case "adamw":
            kind, options, name = choose_adam(settings.implementation, homes)
            return kind, options | {"betas": settings.betas, "eps": settings.eps}, name
        case "adamw8bit":
            return zero.AdamW8bit, adam, "AdamW with moments of 8 bits"
        case "adamw_bf16":
            return zero.AdamWBf16, adam, "AdamW with moments in bf16"
        case "muon":
            muon = asdict(settings.muon)
            muon.pop("per_head")  # a setting of groups
            muon["adjust_lr_fn"] = muon.pop("adjust_lr")
            return zero.Muon, cautious | with_momentum | muon, "Muon, and fused AdamW"
        case "soap":
            return zero.Soap, adam | asdict(settings.soap), "SOAP, and fused AdamW"
        case "sgd":
            return torch.optim.SGD, with_momentum | {"fused": True}, "torch.optim.SGD(fused=True)"
        case unknown:
            assert_never(unknown)


def _adam_options(settings: OptimizerSettings) -> dict[str, Any]:
    return {"betas": settings.betas, "eps": settings.eps, "cautious_decay": settings.cautious_decay}


def choose_adam(implementation: str, homes: Homes) -> ChosenOptimizer:
    """Return (class, options, name for the log) of the AdamW to use. Raises ConfigError if apex's does not work."""
    if implementation == "torch":
        return torch.optim.AdamW, {"fused": True}, "torch.optim.AdamW(fused=True)"
    params = [nn.Parameter(torch.zeros(1, device=homes.device))]
    fused = find_apex("apex.optimizers", "FusedAdam", lambda fused: fused(params), homes.device)
    is_offloaded = homes.optimizer.is_apart
    if fused is None or is_offloaded:
        problem = "cannot update states in host memory" if is_offloaded else f"does not work on {homes.device.type}"
        raise ConfigError(f"optimizer.implementation=apex: FusedAdam {problem}; choose optimizer.implementation=torch")
    return fused, {"adam_w_mode": True}, "apex.optimizers.FusedAdam"
