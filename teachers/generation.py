"""One answer of a teacher, whatever its kind. No torch here, `plan` imports this."""

from dataclasses import dataclass, field

WITHHELD = "withheld"  # the finish reason of an answer that a server does not give


@dataclass
class Generation:
    """One answer. Row i of the lists belongs to `ids[i]`; without `top_logprobs` they are empty."""

    ids: list[int] = field(default_factory=list)  # with the EOS that ended it
    finish_reason: str = "length"  # "stop": an EOS came; "length": it was cut at max_new_tokens
    topk_ids: list[list[int]] = field(default_factory=list)  # [len, K]
    topk_logprobs: list[list[float]] = field(default_factory=list)  # [len, K], ln p at T=1
    tail_mass: list[float] = field(default_factory=list)  # [len], 1 - the kept probability
