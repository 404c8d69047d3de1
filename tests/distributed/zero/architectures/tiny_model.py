"""A tiny model of any model type of transformers, with inputs that it accepts."""

import importlib
import inspect
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.distributed.zero.architectures.inputs import BATCH, make_inputs, num_forms
from tests.distributed.zero.architectures.outcomes import FIXED_STATISTICS
from tests.distributed.zero.architectures.precision import computing_in_float64
from tests.distributed.zero.architectures.tiny_config import tiny_config

MAX_NUMEL = 8_000_000

# A class with a head is taken before the bare model, so that tied embeddings are covered.
MAPPINGS = [
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
]


@dataclass(frozen=True)
class Recipe:
    """A way to build and run a tiny model of a model type: the names of its class and of its inputs."""

    model_type: str
    class_name: str
    input_names: tuple[str, ...]
    shrinks: bool  # False: the default configuration is small enough, and the rules break it

    @property
    def config(self) -> PreTrainedConfig:
        return tiny_config(self.model_type, self.shrinks)

    def build(self) -> PreTrainedModel:
        candidates = class_candidates(self.config)
        return build(next(found for found in candidates if found.__name__ == self.class_name), self.config)


class NotBuildable(Exception):
    """Raised if no class of a model type runs with inputs that the rules make; the message has the last reason."""


def class_candidates(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    """Return the model classes of a configuration, the preferred one first."""
    model_type, found = config.model_type, []
    for mapping in MAPPINGS:
        names = getattr(modeling_auto, mapping).get(model_type, ())
        for name in [names] if isinstance(names, str) else names:
            found.append(name)
    classes = [getattr(transformers, name) for name in found if hasattr(transformers, name)]
    classes += list(_classes_in_module(config))
    return list(dict.fromkeys(classes))


def _classes_in_module(config: PreTrainedConfig) -> Iterator[type[PreTrainedModel]]:
    """Iterate over the model classes beside the configuration's class that take it."""
    folder = type(config).__module__.rpartition(".")[0]
    name = type(config).__module__.rpartition(".")[2].replace("configuration_", "modeling_")
    module = importlib.import_module(f"{folder}.{name}")
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, PreTrainedModel) and value.__module__ == module.__name__
    ]
    for value in own:
        if (
            value.config_class is type(config)
            and "forward" in vars(value)
            and not value.__name__.endswith("PreTrainedModel")
        ):
            yield value


def build(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model in float64, with noise on the initial values: zeros and ones would leave gradients at zero."""
    with torch.device("meta"):
        numel = sum(param.numel() for param in model_class(config).parameters())
    if numel > MAX_NUMEL:
        raise NotBuildable(f"{model_class.__name__} has {numel:,} parameters")
    torch.manual_seed(0)
    model = model_class._from_config(config, experts_implementation="eager").to(torch.float64)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.nan_to_num(0, 0, 0).clamp(-5, 5) + 0.05 * torch.randn_like(param))
    model.train()
    for module in model.modules():
        if config.model_type in FIXED_STATISTICS and isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def prepare(model_type: str) -> Recipe:
    """Return the first class, and the first set of inputs, that run a forward and a backward."""
    reasons: dict[str, str] = {}
    for shrinks in (True, False):
        try:
            classes = class_candidates(tiny_config(model_type, shrinks))
        except Exception as error:
            reasons["configuration"] = describe(error)
            continue
        for model_class in classes:
            try:
                model = build(model_class, tiny_config(model_type, shrinks))
                tries = [*multimodal_inputs(model), *input_names(model)]
            except Exception as error:
                reasons.setdefault(model_class.__name__, describe(error))
                continue
            for names in tries:
                try:
                    check_trains(model, names)
                except Exception as error:
                    reasons.setdefault(f"{model_class.__name__}({', '.join(names)})", describe(error))
                else:
                    return Recipe(model_type, model_class.__name__, names, shrinks)
    raise NotBuildable("; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "it has no model class")


def multimodal_inputs(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Iterate over the inputs of a language model with images or sounds: a token stands for each of their features."""
    accepted = inspect.signature(model.forward).parameters
    for modality, main in {"image": "pixel_values", "audio": "input_features"}.items():
        method = f"get_{modality}_features"
        owner = next((owner for owner in (model, getattr(model, "model", None)) if hasattr(owner, method)), None)
        if owner is None or not {"input_ids", main} <= accepted.keys():
            continue
        wanted = inspect.signature(getattr(owner, method)).parameters
        extra = [name for name in wanted if name != main and num_forms(name) and name in accepted]
        required = [name for name in extra if wanted[name].default is wanted[name].empty]
        types = ["mm_token_type_ids"] if "mm_token_type_ids" in accepted else []
        decoder = ["decoder_input_ids"] if "decoder_input_ids" in accepted else []
        for form, others in itertools.product(range(min(4, num_forms(main))), (extra, required)):
            names = [f"{main}/{form}" if form else main, *others]
            try:
                number = num_features(getattr(owner, method), model.config, names) // BATCH
            except Exception:  # not in this form
                continue
            yield (*(f"{name}:{number}:{modality}" for name in ["input_ids", *types]), *names, *decoder)


def num_features(method: Callable[..., Any], config: PreTrainedConfig, names: list[str]) -> int:
    """Return how many vectors an encoder of another modality returns for a batch."""
    with torch.no_grad(), computing_in_float64():
        output = method(**make_inputs(config, tuple(names), step=0, rank=0))
    features = list(tensors_in(getattr(output, "pooler_output", output)))
    return sum(part.numel() // part.shape[-1] for part in features)


def describe(error: BaseException, max_length: int | None = 200) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:max_length]


OPTIONAL = ["input_ids", "pixel_values", "input_features", "input_values", "decoder_input_ids", "bbox"]


def input_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Return sets of input names to try: the main and the required ones, then the optional ones too, in all forms."""
    parameters = {
        name: p for name, p in inspect.signature(model.forward).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD
    }
    required = [name for name, p in parameters.items() if p.default is p.empty]
    main = [model.main_input_name] if model.main_input_name in parameters else []
    decoder = [name for name in parameters if name == "decoder_input_ids"]
    optional = [name for name in OPTIONAL if name in parameters]
    alternatives = {"inputs_embeds", "encoder_hidden_states"} - set(main + required)
    known = [name for name in parameters if num_forms(name) and name not in alternatives]
    tries = [main + required + optional, main + required + decoder, main + required, required + optional, required]
    embedded = [name for name in parameters if name == "inputs_embeds"] + required
    tries = list(dict.fromkeys(tuple(dict.fromkeys(names)) for names in [*tries, known, embedded]))
    return list(dict.fromkeys(variant for names in tries if names for variant in in_all_forms(names)))


def in_all_forms(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Iterate over the forms of inputs, of all of them together, and of all but the tokens."""
    for form in range(max(num_forms(name) for name in names)):
        for fixed in ((), ("input_ids", "decoder_input_ids")):
            yield tuple(f"{n}/{form}" if 0 < form < num_forms(n) and n not in fixed else n for n in names)


def check_trains(model: PreTrainedModel, names: tuple[str, ...]) -> None:
    loss = loss_of(model, model.config, names, step=0, rank=0)
    loss.backward()
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    if not all(gradient.isfinite().all() for gradient in gradients):
        raise NotBuildable("gradients are not finite")
    if not sum(gradient.abs().sum() for gradient in gradients):
        raise NotBuildable("all gradients are zero")


def loss_of(model: nn.Module, config: PreTrainedConfig, names: tuple[str, ...], *, step: int, rank: int) -> Tensor:
    """Return a fixed function of everything differentiable that the model returns."""
    inputs = make_inputs(config, names, step, rank)
    seed_all(1000 + 10 * step + rank)  # dropout, and random patterns of attention
    with computing_in_float64():
        output = model(**inputs)
        found = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        if not found:
            raise NotBuildable("no output is differentiable")
        return sum(_scalar(tensor) for tensor in found)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _scalar(tensor: Tensor) -> Tensor:
    """Return a projection on fixed weights; tanh bounds masked values such as the lowest of a dtype."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    weights = torch.arange(tensor.numel(), dtype=torch.float64).cos().view(tensor.shape)
    return (tensor.tanh() * weights).sum() / tensor.numel() ** 0.5


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested dictionaries, tuples, lists and outputs."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))
    elif isinstance(tree, (tuple, list)):
        for branch in tree:
            yield from tensors_in(branch)
