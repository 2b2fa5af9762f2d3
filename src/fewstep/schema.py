"""The base of every recipe section: frozen, and closed to unknown keys."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """One section of a recipe; each room defines its own beside the code it configures."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
