"""Recipe section `student`: facts that the student's own config.json carries from then on."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from fewstep.schema import Config


class StudentConfig(Config):
    """What the teacher's checkpoint is turned into."""

    base: str | Path | None = Field(
        None, description="start from another checkpoint with the same tokenizer; default: the teacher's own weights"
    )
    attention: Literal["block", "bidirectional", "block_causal_inside"] = Field(
        "block", description="what a noisy position sees"
    )
    alignment: Literal["same_position", "shifted"] = Field(
        "same_position",
        description="which position's output says a token: its own, or the one before it as in AR models (a baseline)",
    )
    block_size: int = Field(16, ge=1, le=256, description="largest block trained, and the default when decoding")
    mask_token: Literal["auto"] | int = Field(
        "auto", description="auto: an unused row of the vocabulary, else a new row"
    )
