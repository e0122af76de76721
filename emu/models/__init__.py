"""Plain torch transformers, published shapes and a real text. Nothing here knows that devices may be virtual."""

from emu.models.attention import attention
from emu.models.config import Config, ConfigError
from emu.models.decoder import GPT, Decoder
from emu.models.presets import PRESETS, UnknownModelError, config
from emu.models.text import batches, text, tokens

__all__ = [
    "GPT",
    "PRESETS",
    "Config",
    "ConfigError",
    "Decoder",
    "UnknownModelError",
    "attention",
    "batches",
    "config",
    "text",
    "tokens",
]
