"""Simulating a training step: which ranks run, by shapes alone, and what that takes of time, memory and energy."""

from emu.simulation.outcome import Figures, Simulated
from emu.simulation.simulate import simulate

__all__ = ["Figures", "Simulated", "simulate"]
