"""Model cards by their address of before 0.3: see [`hf_posenc.hub.cards`]."""

from .hub.cards import ModelCardCallback, Results, make_card, write_card


__all__ = ["ModelCardCallback", "Results", "make_card", "write_card"]
