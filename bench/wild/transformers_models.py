"""Every architecture of `transformers` that has a plain model class, shrunk by its configuration, and inputs that it runs on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bench.wild.shrinking import ways

MOST_PARAMETERS = 20_000_000
BATCH, LENGTH = 2, 8
UNMASKED = ("longt5", "switch_transformers")  # they make no mask of their own while they are traced


class NotBuilt(Exception):
    """No shrunk configuration gives a model that runs on inputs made here."""


def names() -> list[str]:
    """The model types, in alphabetical order."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def build(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A small model of that type and an example that it runs on: the first pair of the ways below that works."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    tried: dict[str, str] = {}
    try:
        kind = CONFIG_MAPPING[name]
        published = kind()
        found = MODEL_MAPPING[kind]
        model_class = found[0] if isinstance(found, (tuple, list)) else found
    except (Exception, SystemExit) as error:
        raise NotBuilt(f"its configuration: {_line(error)}") from error
    for way, shrink in ways():
        try:
            config = shrunk(published, shrink)
            with torch.device("meta"):
                size = sum(value.numel() for value in model_class(config).parameters())
            if size > MOST_PARAMETERS:
                tried[way] = f"{size:,} parameters"
                continue
            torch.manual_seed(0)
            model = model_class(config).eval()
        except (Exception, SystemExit) as error:
            tried[way] = _line(error)
            continue
        for cached in (config.use_cache, False) if getattr(config, "use_cache", False) else (None,):  # a cache may need attention
            if cached is not None:
                config.use_cache = cached
            for example in examples(model, config):
                try:
                    with torch.no_grad():
                        model(**example)
                    return model, example
                except Exception as error:
                    tried.setdefault(way, _line(error))
        tried.setdefault(way, "no floating-point input is known for it")
    raise NotBuilt("; ".join(f"{way}: {why}" for way, why in tried.items()))


def shrunk(config: Any, shrink: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    """The configuration with its own settings and those of every part of it shrunk."""
    return type(config)(**_settings(config, shrink))


def _settings(config: Any, shrink: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    parts = {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}
    own = {
        name: value for name, value in config.to_dict().items() if name not in parts and name not in UNKEPT and value is not None
    }
    changed = {name: value for name, value in shrink(own).items() if value != own[name] or name in KEPT}
    for name, part in parts.items():
        whole = {key: value for key, value in part.to_dict().items() if key not in STAGES}
        changed[name] = {**whole, **_settings(part, shrink)} if part.model_type else _settings(part, shrink)
    return changed


STAGES = ("out_features", "out_indices", "stage_names", "_out_features", "_out_indices")  # of layers that may be gone
UNKEPT = (
    *STAGES,
    "architectures",
    "transformers_version",
    "model_type",
    "dtype",
    "torch_dtype",
    "_name_or_path",
    "id2label",
    "label2id",
)
KEPT = ("use_timm_backbone", "use_pretrained_backbone")


def examples(model: torch.nn.Module, config: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Keyword arguments with at least one floating-point tensor, from the names in the signature."""
    signature = inspect.signature(model.forward).parameters
    known, further = set(signature), _further(signature)
    needed = {name for name, parameter in signature.items() if parameter.default is parameter.empty}
    needed |= {"attention_mask"} if config.model_type in UNMASKED else set()
    masks = [name for name in signature if "mask" in name and name in needed]
    for name, values in _first_inputs(model, config, known):
        others = {key: make(model, config) for key, make in further.items() if key != name}
        for axis in (1, 2) if masks else (1,):  # a mask that must be given: over the tokens, which are along one of these axes
            seen = torch.ones(BATCH, values.shape[min(axis, values.dim() - 1)], dtype=torch.bool)
            yield {name: values, **others, **dict.fromkeys(masks, seen)}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(len(shape)))


def _embedding_width(model: torch.nn.Module, config: Any) -> int:
    try:
        table = model.get_input_embeddings()  # type: ignore[operator]
        return int(table.weight.shape[-1])
    except (AttributeError, NotImplementedError):
        text = config.get_text_config()
        return int(getattr(text, "hidden_size", 0) or getattr(text, "d_model", 32))


def _find(config: Any, *wanted: str) -> Any:
    """A setting of the configuration or of one of its parts, the first that has it."""
    from transformers import PreTrainedConfig

    for name in wanted:
        value = getattr(config, name, None)
        if isinstance(value, (int, list, tuple)) and value:
            return value
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig) and (found := _find(part, *wanted)):
            return found
    return None


def _further(signature: Mapping[str, inspect.Parameter]) -> dict[str, Callable[[torch.nn.Module, Any], torch.Tensor]]:
    known = set(signature)

    def decoder(model: torch.nn.Module, config: Any) -> torch.Tensor:
        return _random(LENGTH - 2, _embedding_width(model, config))

    def ids(model: torch.nn.Module, config: Any) -> torch.Tensor:
        return torch.arange(4, 10).expand(BATCH, -1)

    def boxes(model: torch.nn.Module, config: Any) -> torch.Tensor:
        return torch.tensor([0, 0, 10, 10]).expand(BATCH, LENGTH, 4)

    def encoded(model: torch.nn.Module, config: Any) -> torch.Tensor:
        return _random(LENGTH, _find(config, "encoder_hidden_size", "hidden_size"))

    table = {"decoder_inputs_embeds": decoder, "bbox": boxes}
    if "query_embeds" in known:  # which attend to what another network has made
        table["encoder_hidden_states"] = encoded
    if "decoder_inputs_embeds" not in known:
        table["decoder_input_ids"] = ids
    required = signature["input_ids"].default is inspect.Parameter.empty if "input_ids" in known else False
    if "pixel_values" in known and ("inputs_embeds" not in known or required):
        table["input_ids"] = ids
    return {name: make for name, make in table.items() if name in known}


def _first_inputs(model: torch.nn.Module, config: Any, known: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("inputs_embeds", "query_embeds"):
        if name in known:
            yield name, _random(LENGTH, _embedding_width(model, config))
    for name in ("pixel_values", "pixel_values_videos", "pixel_values_images", "vision_values"):
        if name in known:
            for shape in _images(config, "video" in name):
                yield name, _random(*shape)
    mel = (
        _find(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "num_mels", "model_in_dim", "mel_bins")
        or 80
    )
    length = 2 * (_find(config, "max_source_positions", "max_position_embeddings") or 32)
    for name in ("input_features", "spectrogram", "audio_mel"):
        if name in known:
            shapes = [(mel, length), (length, mel), (mel, 64), (64, mel), (1, 64, mel), (64, 2 * mel)]
            for shape in shapes if length <= 256 else (*shapes[2:], *shapes[:2]):  # the smaller first
                yield name, _random(*shape)
    for name in ("input_values", "audio_values", "past_values", "inputs", "hidden_states", "latents", "states", "state"):
        if name in known:
            width = _embedding_width(model, config)
            channels = _find(config, "num_input_channels", "input_size") or 1
            context = _find(config, "context_length", "prediction_length") or 32
            channels = channels if isinstance(channels, int) else 1
            spectrogram = (_find(config, "max_length") or 64, mel)
            shapes = ((4000,), (1, 4000), (context, channels), (context,), (LENGTH, width), (64, 16), (width,), spectrogram)
            for shape in ((64,), *shapes[2:]) if name == "past_values" else shapes:  # a series of times is no sound
                yield name, _random(*shape)


def _images(config: Any, video: bool) -> Iterator[tuple[int, ...]]:
    """(channels, height, width), with frames before them for videos, in the sizes that the configuration may mean."""
    channels = _find(config, "num_channels", "in_channels", "in_chans")
    channels = channels if isinstance(channels, int) else 3
    stated = _find(config, "image_size", "img_size", "input_size", "crop_size") or 32
    size = stated if isinstance(stated, int) else stated[-1]
    for side in dict.fromkeys((min(size, 256), 32, 64, 128)):
        frames = _find(config, "num_frames", "frames_per_clip") or 2
        yield from ((frames, channels, side, side),) if video else ((channels, side, side), (frames, channels, side, side))


def _line(error: BaseException) -> str:
    text = re.sub(r" from '[^']*'", "", str(error)).strip().splitlines()  # where a module lies is no matter of the table
    return f"{type(error).__name__}: {text[0][:150]}" if text else type(error).__name__
