"""Proving a program right: tiers of equality, checks against one device, and how good the check is."""

from emu.equivalence.check import TIERS, check
from emu.equivalence.exact import Certificate, ExactMode
from emu.equivalence.hazard_proof.hazards import hazards, prove
from emu.equivalence.hazard_proof.proof import Hazard, Hazards
from emu.equivalence.verdict import Verdict
from emu.equivalence.verify import verify

__all__ = ["TIERS", "Certificate", "ExactMode", "Hazard", "Hazards", "Verdict", "check", "hazards", "prove", "verify"]
