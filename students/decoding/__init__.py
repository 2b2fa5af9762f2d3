"""Few-step decoding of a block-diffusion student.

These files need torch and transformers only: a published student carries them, byte for byte, as
its `custom_generate/` folder, so what was evaluated is what strangers run.
"""

from .decode import Decoded, decode

__all__ = ["Decoded", "decode"]
