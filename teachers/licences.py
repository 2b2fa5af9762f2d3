"""The teacher's licence: read from its card, and what it asks of a model that is trained on its answers.

This is no legal advice: the table names licences whose authors are known to put conditions on such models, so that
nobody meets them after publishing. No torch here, `plan` imports this.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from fewstep.errors import UserError
from fewstep.teachers.config import TeacherConfig

# Beginning of a licence's name → what it asks. The first that fits counts.
CONDITIONS = {
    "cc-by-nc": "no commercial use",
    "cc-by-nd": "no derived works",
    "llama3.1": "a model trained on its answers must have Llama at the beginning of its name, say Built with Llama and pass on its use policy",
    "llama3.2": "a model trained on its answers must have Llama at the beginning of its name, say Built with Llama and pass on its use policy",
    "llama3.3": "a model trained on its answers must have Llama at the beginning of its name, say Built with Llama and pass on its use policy",
    "llama4": "a model trained on its answers must have Llama at the beginning of its name, say Built with Llama and pass on its use policy",
    "llama": "its answers may not improve any other model",
    "gemma": "its use restrictions pass on to models trained on its answers",
    "deepseek": "its use restrictions pass on to models trained on its answers",
    "other": "its own conditions, which no list knows",
}
# Part of a name → the same, for families of licences.
FAMILIES = {
    "rail": "its use restrictions pass on to derived models",
    "creativeml": "its use restrictions pass on to derived models",
    "deepfloyd": "its use restrictions pass on to derived models",
    "noncommercial": "no commercial use",
    "non-commercial": "no commercial use",
    "-nc": "no commercial use",
    "research": "research use alone",
    "amlr": "research use alone",
}


@dataclass(frozen=True)
class Licence:
    """What a card says of a model's licence; `conditions` is None where the table knows of none."""

    name: str | None
    link: str | None
    conditions: str | None

    def facts(self) -> dict:
        return asdict(self)


def read_licence(card: str | None, declared: str | None = None) -> Licence:
    """Return the licence of a model.

    Args:
        card: its README.md, with a YAML header.
        declared: what the weights' file itself says, where there is no card (GGUF).
    """
    header = _header(card or "")
    given = header.get("license") or declared
    if isinstance(given, list):
        given = given[0] if given else None
    name = str(given).strip().lower() if given else None
    if name == "other" and header.get("license_name"):
        name = str(header["license_name"]).strip().lower()
    link = header.get("license_link")
    known = {"apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc0-1.0"}
    asks = None
    if name is not None and name not in known:
        asks = next((said for begins, said in CONDITIONS.items() if name.startswith(begins)), None)
        asks = asks or next((said for part, said in FAMILIES.items() if part in name), None)
        if asks is None and str(given).strip().lower() == "other":
            asks = CONDITIONS["other"]
    return Licence(name, str(link) if link else None, asks)


def check_licence(teacher: TeacherConfig, licence: Licence) -> None:
    """Raise UserError where the licence puts conditions that the recipe does not acknowledge by the licence's name."""
    acknowledged = teacher.acknowledge
    if teacher.is_endpoint and not (acknowledged or "").strip():
        raise UserError(
            f"teacher.model {teacher.model}: a server does not say under which licence its answers may train a model; read it, "
            "keep to it, and set teacher.acknowledge to its name"
        )
    if licence.conditions is None:
        return
    if acknowledged is None or acknowledged.strip().lower() != licence.name:
        got = "" if acknowledged is None else f" (it says {acknowledged!r})"
        where = f" ({licence.link})" if licence.link else ""
        raise UserError(
            f"teacher.model {teacher.model}: its licence {licence.name}{where} asks: {licence.conditions}; once you have read it and "
            f"keep to it, set teacher.acknowledge: {licence.name}{got}"
        )


def card_in(folder: Path) -> str | None:
    """Return a folder's README.md, or None."""
    try:
        return (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _header(card: str) -> dict:
    found = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(?:\n|$)", card, re.DOTALL)
    if not found:
        return {}
    try:
        header = yaml.safe_load(found[1])
    except yaml.YAMLError:
        return {}
    return header if isinstance(header, dict) else {}
