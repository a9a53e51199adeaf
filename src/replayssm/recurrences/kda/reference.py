"""Kimi Delta Attention, by definition: the gated delta rule with a decay of its own for every key channel, E = K.

The equations and their order are those of gdn, Diag(a_t) in place of the scalar, so the definition is shared.
"""

from replayssm.recurrences.gdn.reference import back, carry, fold, step

__all__ = ["back", "carry", "fold", "step"]
