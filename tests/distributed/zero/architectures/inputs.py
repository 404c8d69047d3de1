"""Inputs of any model of transformers, by the name of the argument.

An argument has several forms, such as an image, a video, or a row of patches; "pixel_values/1" is the second form.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Generator, Tensor
from transformers import PreTrainedConfig

Maker = Callable[[PreTrainedConfig, Generator], Any]

BATCH, LENGTH, NUM_SAMPLES, NUM_FRAMES, GRID = 2, 8, 6000, 64, (1, 4, 4)


# A modality: the settings that hold the token which stands for a part of an image, or of a sound.
PLACES = {"image": ("image_token_id", "image_token_index"), "audio": ("audio_token_id", "audio_token_index")}


def make_inputs(config: PreTrainedConfig, names: tuple[str, ...], step: int, rank: int) -> dict[str, Any]:
    """Return the inputs of one step of one rank. "input_ids:4:image" are ids with 4 places for an image."""
    generator = Generator().manual_seed(100 * step + rank)
    inputs = {}
    for name in names:
        form, *places = name.split(":")
        argument, _, number = form.partition("/")
        inputs[argument] = MAKERS[argument][int(number or 0)](config, generator)
        if places:
            inputs[argument] = with_places(inputs[argument], argument, config, *places)
    return inputs


def with_places(ids: Tensor, argument: str, config: PreTrainedConfig, number: str, modality: str) -> Tensor:
    """Return the ids, or types of tokens, with `number` places for another modality after the first."""
    value = find(config, *PLACES[modality]) if argument == "input_ids" else 1
    return torch.cat([ids[:, :1], torch.full((len(ids), int(number)), value), ids[:, 1:]], 1)


def num_forms(argument: str) -> int:
    """Return how many forms of an argument can be made."""
    return len(MAKERS.get(argument, ()))


def find(config: PreTrainedConfig, *names: str, default: Any = None) -> Any:
    """Return the first of these settings that the configuration or one inside it has."""
    for inner in _configs_in(config):
        for name in names:
            value = getattr(inner, name, None)
            if value is not None:
                return value
    return default


def _configs_in(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _configs_in(value)


def normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def tokens(config: PreTrainedConfig, generator: Generator) -> Tensor:
    """Return ids of usual tokens: special ones are below 5 and above 60."""
    return torch.randint(5, min(60, find(config, "vocab_size", default=60)), (BATCH, LENGTH), generator=generator)


def codes(config: PreTrainedConfig, generator: Generator) -> Tensor:
    """Return ids in several codebooks."""
    num_codebooks = find(config, "num_codebooks", "n_codes_total", "num_quantizers", "num_channels", default=2)
    return torch.randint(5, 30, (BATCH, LENGTH, num_codebooks), generator=generator)


def flat_codes(config: PreTrainedConfig, generator: Generator) -> Tensor:
    return torch.randint(5, 30, (BATCH * find(config, "num_codebooks", default=2), LENGTH), generator=generator)


def image_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return channels, height and width."""
    size = find(config, "image_size", "img_size", "input_size", default=64)
    if isinstance(size, dict):
        size = [size["height"], size["width"]]
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = find(config, "num_channels", "in_channels", "in_chans", "num_input_channels", default=3)
    return channels if isinstance(channels, int) else 3, height, width


def images(config: PreTrainedConfig, generator: Generator) -> Tensor:
    return normal(generator, BATCH, *image_shape(config))


def large_images(config: PreTrainedConfig, generator: Generator) -> Tensor:
    return normal(generator, BATCH, image_shape(config)[0], 128, 128)


def videos(config: PreTrainedConfig, generator: Generator) -> Tensor:
    num_frames = find(config, "num_frames", "frames_per_clip", default=2)
    return normal(generator, BATCH, num_frames, *image_shape(config))


def pairs_of_images(config: PreTrainedConfig, generator: Generator) -> Tensor:
    return normal(generator, BATCH, 2, image_shape(config)[0], 64, 64)


def patches(config: PreTrainedConfig, generator: Generator) -> Tensor:
    """Return the pixels of the patches of all images, one row a patch."""
    patch = find(config, "patch_size", default=8)
    numel = image_shape(config)[0] * find(config, "temporal_patch_size", default=1) * patch**2
    return normal(generator, BATCH * GRID[0] * GRID[1] * GRID[2], numel)


def batched_patches(config: PreTrainedConfig, generator: Generator) -> Tensor:
    return patches(config, generator).unflatten(0, (BATCH, -1))


def grid(_config: PreTrainedConfig, _generator: Generator) -> Tensor:
    return torch.tensor([GRID] * BATCH)


def num_bins(config: PreTrainedConfig) -> int:
    bins = find(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_size", "input_dim")
    bins = find(config, "feature_projection_input_dim", default=bins)
    return bins if isinstance(bins, int) else 16


def spectrogram(config: PreTrainedConfig, generator: Generator) -> Tensor:
    return normal(generator, BATCH, num_bins(config), 2 * find(config, "max_source_positions", default=NUM_FRAMES // 2))


def frames(config: PreTrainedConfig, generator: Generator) -> Tensor:
    return normal(generator, BATCH, find(config, "max_length", default=NUM_FRAMES), num_bins(config))


def one_channel_of_frames(config: PreTrainedConfig, generator: Generator) -> Tensor:
    return normal(generator, BATCH, 1, NUM_FRAMES, num_bins(config))


def waveform(_config: PreTrainedConfig, generator: Generator) -> Tensor:
    return normal(generator, BATCH, NUM_SAMPLES)


def channels_of_waves(config: PreTrainedConfig, generator: Generator) -> Tensor:
    return normal(generator, BATCH, find(config, "audio_channels", default=1), 3840)


def first_places(config: PreTrainedConfig, _generator: Generator) -> Tensor:
    """Return a mask of the tokens that an image replaces."""
    return (torch.arange(LENGTH) < find(config, "latent_query_num", default=1)).expand(BATCH, -1)


def places_of_patches(_config: PreTrainedConfig, _generator: Generator) -> Tensor:
    return torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(BATCH, -1, -1)


def placed_patches(config: PreTrainedConfig, generator: Generator) -> Tensor:
    """Return patches after the numbers of their row and column, counted from 1."""
    return torch.cat([1.0 + places_of_patches(config, generator), batched_patches(config, generator)], -1)


def states(*names: str) -> Maker:
    """Return a maker of vectors in each step, as long as one of these settings says, or 1."""
    return lambda config, generator: normal(generator, BATCH, LENGTH, find(config, *names, default=1) if names else 1)


def hidden_states(config: PreTrainedConfig, generator: Generator) -> Tensor:
    return normal(generator, BATCH, LENGTH, find(config, "hidden_size", "d_model", "n_embd", "embed_dim", default=32))


def series(config: PreTrainedConfig, generator: Generator) -> Tensor:
    past = find(config, "context_length", default=8) + max(find(config, "lags_sequence", default=[0]))
    return normal(generator, BATCH, past).abs()


def channels_of_series(config: PreTrainedConfig, generator: Generator) -> Tensor:
    return series(config, generator).unsqueeze(-1).expand(-1, -1, find(config, "num_input_channels", default=1))


def future(config: PreTrainedConfig, generator: Generator) -> Tensor:
    return normal(generator, BATCH, find(config, "prediction_length", default=4)).abs()


def boxes(_config: PreTrainedConfig, generator: Generator) -> Tensor:
    corners = torch.randint(0, 30, (BATCH, LENGTH, 4), generator=generator)
    return torch.cat([corners[..., :2], corners[..., :2] + corners[..., 2:]], -1)


def unit_boxes(config: PreTrainedConfig, generator: Generator) -> Tensor:
    return boxes(config, generator).double() / 64


def ones(*shape: int) -> Maker:
    return lambda _config, _generator: torch.ones(*shape, dtype=torch.long)


def of_shape(make: Maker, *sizes: int) -> Maker:
    """Return a maker of ones that are as long as what `make` makes, and `sizes` after it."""
    return lambda config, generator: torch.ones(*make(config, generator).shape[:2], *sizes, dtype=torch.float64)


MAKERS: dict[str, list[Maker]] = {
    "input_ids": [tokens, codes, flat_codes, tokens, tokens],
    "decoder_input_ids": [tokens, tokens, tokens, codes, flat_codes],
    "qformer_input_ids": [tokens],
    "mm_token_type_ids": [lambda _config, _generator: torch.zeros(BATCH, LENGTH, dtype=torch.long)],
    "image_sizes": [lambda config, _generator: torch.tensor([image_shape(config)[1:]] * BATCH)],
    "image_position_ids": [places_of_patches],
    "pixel_values": [images, videos, patches, batched_patches, large_images, pairs_of_images],
    "pixel_values_videos": [videos],
    "pixel_attention_mask": [ones(BATCH, GRID[1] * GRID[2])],
    "spatial_shapes": [lambda _config, _generator: torch.tensor([GRID[1:]] * BATCH)],
    "prompt_pixel_values": [images],
    "prompt_masks": [images],
    "flattened_patches": [placed_patches],
    "visual_feats": [states("visual_feat_dim")],
    "visual_pos": [unit_boxes],
    "grid_thw": [grid],
    "image_grid_thw": [grid],
    "image_attention_mask": [ones(BATCH, LENGTH, 2)],
    "image_embeds_position_mask": [first_places],
    "pixel_position_ids": [places_of_patches],
    "merge_sizes": [ones(BATCH)],
    "input_features": [spectrogram, frames, channels_of_waves, one_channel_of_frames],
    "input_values": [waveform, channels_of_waves, frames],
    "inputs": [waveform],
    "input_features_mask": [of_shape(frames)],
    "hidden_states": [hidden_states, patches, channels_of_waves],
    "inputs_embeds": [hidden_states],
    "encoder_hidden_states": [hidden_states],
    "attention_mask": [ones(BATCH, LENGTH)],
    "bbox": [boxes, unit_boxes],
    "past_values": [series, channels_of_series],
    "past_time_features": [of_shape(series, 1)],
    "past_observed_mask": [of_shape(series)],
    "future_values": [future],
    "future_time_features": [of_shape(future, 1)],
    "states": [states("state_dim")],
    "actions": [states("act_dim")],
    "rewards": [states()],
    "returns_to_go": [states()],
    "timesteps": [lambda _config, _generator: torch.arange(LENGTH).expand(BATCH, -1)],
    "spectrogram": [
        lambda config, generator: normal(generator, BATCH, LENGTH, find(config, "model_in_dim", default=16))
    ],
}
