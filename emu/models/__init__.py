"""Plain torch transformers, published shapes and a real text. Nothing here knows that devices may be virtual."""

from emu.models.attention import attention
from emu.models.config import Config, ConfigError
from emu.models.decoder import GPT, Decoder
from emu.models.loss import CrossEntropy
from emu.models.moe import Experts, MoE
from emu.models.presets import PRESETS, UnknownModelError, config
from emu.models.router import Balance, Capacity, Router, Routing
from emu.models.routing import UnknownRouting, declared
from emu.models.text import batches, text, tokens

__all__ = [
    "GPT",
    "PRESETS",
    "Balance",
    "Capacity",
    "Config",
    "ConfigError",
    "CrossEntropy",
    "Decoder",
    "Experts",
    "MoE",
    "Router",
    "Routing",
    "UnknownModelError",
    "UnknownRouting",
    "attention",
    "batches",
    "config",
    "declared",
    "text",
    "tokens",
]
