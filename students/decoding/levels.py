"""Effort levels: samplers and settings that an evaluation calibrated, named in a published student's generation config."""


def settings_of(levels: dict[str, dict] | None, name: str) -> dict:
    """Return `sampler` and settings of a level, as `decode` takes them.

    Args:
        levels: `generation_config.fewstep_effort`: name → sampler and settings, or the reason why there is none.

    Raises:
        ValueError: the student has no such level.
    """
    if not levels:
        raise ValueError(f"effort={name!r:.40}: this student has no calibrated levels; give sampler instead")
    usable = [level for level, entry in levels.items() if "sampler" in entry]
    if name not in usable:
        reason = levels.get(name, {}).get("reason", "no such level")
        raise ValueError(f"effort={name!r:.40}: {reason}; this student has {', '.join(usable) or 'none'}")
    return {"sampler": levels[name]["sampler"], **levels[name]["settings"]}
