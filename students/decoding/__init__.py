"""Few-step decoding of a block-diffusion student.

These files need torch and transformers only: a published student carries them, byte for byte, as
its `custom_generate/` folder, so strangers get the text that was evaluated. (Evaluation and server
also lay the weights out by column, `weights.py`, which is faster on one CPU core and cannot be saved.)
"""

from .decode import Decoded, decode

__all__ = ["Decoded", "decode"]
