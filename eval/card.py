"""The model card of a published student: a valid YAML header, the measured table, how to use it."""

import re
from typing import Any

import yaml

from fewstep.eval import verdict
from fewstep.markup import visible

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def write(content: dict) -> str:
    """Return MODEL_CARD.md for the content of report.json.

    `base_model` stands in the header only where the teacher (or `student.base`) is a Hub id: the Hub
    knows no other kind. Whatever it is, the text names it.
    """
    results, recipe = content["results"], content["recipe"]
    base = base_model(recipe)
    header: dict[str, Any] = {}
    if base:
        header["base_model"] = base
        header["base_model_relation"] = relation(recipe)
    header |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    header["tags"] = ["fewstep", "diffusion-language-model", "block-diffusion", "custom_generate"]
    name, teacher = plain(content["name"]), plain(results["teacher"]["model"])
    parts = [
        "---\n" + yaml.safe_dump(header, sort_keys=False, allow_unicode=True) + "---",
        f"# {name}",
        f"A few-step student of {teacher}, made with fewstep: the same architecture and code, which commits several tokens "
        "in one forward pass. Loaded the ordinary way it is an ordinary autoregressive model.",
    ]
    for said in content["verdicts"]:
        parts.append(f"**{plain(said['task'])}.** {plain(said['text'])} {plain(said['remark'] or '')}".rstrip())
    parts += ["## Results", _table(results), _measured_on(results)]
    parts += ["## How to use it", _usage(content), "## Effort levels", _effort(content["effort"])]
    parts += ["## Limits", _limits(results), "## Where it comes from", _origin(content, base, teacher)]
    return "\n\n".join(p for p in parts if p) + "\n"


def base_model(recipe: dict) -> str | None:
    """Return the Hub id that the student's weights started from, if they came from the Hub."""
    start = (recipe.get("student") or {}).get("base") or (recipe.get("teacher") or {}).get("model")
    return start if isinstance(start, str) and HUB_ID.fullmatch(start) else None


def relation(recipe: dict) -> str:
    """Return "adapter" where the published weights are the base's with adapters beside them, else "finetune"."""
    stages = [recipe.get("distill"), recipe.get("adapt")]
    gated = any(((stage or {}).get("lora") or {}).get("gated") for stage in stages)
    return "adapter" if gated else "finetune"


def plain(value: object) -> str:
    """Return one line of text in which no character starts Markdown or HTML."""
    line = " ".join(visible(value).split())
    return re.sub(r"([\\`*_{}\[\]<>#|~!$&])", r"\\\1", line)


def _table(results: dict) -> str:
    lines = [
        "| task | system | setting | score, % | Δ teacher, points | TPF | tokens/s | × faster AR |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for r in results["rows"]:
        setting = "AR" if r["sampler"] == "ar" else verdict.setting_name(r["sampler"], r["settings"])
        score = f"{verdict.share(r['score'])} {verdict.bracket(r['score_ci'], verdict.share)}"
        delta = "–"
        if r["system"] != "teacher" and r["delta"] is not None:
            delta = f"{verdict.points(r['delta'])} {verdict.bracket(r['delta_ci'], verdict.points)}"
        rate = "–" if r["tokens_per_s"] is None else f"{r['tokens_per_s']:,.0f}"
        times = "–"
        if r["speedup"] is not None:
            ends = f" {verdict.factors(r['speedup_ci'])}" if r["speedup_ci"] else ""
            times = "1 (baseline)" if r["is_speed_baseline"] else verdict.factor(r["speedup"]) + ends
        lines.append(
            f"| {plain(r['task'])} | {r['system']} | {setting} | {score} | {delta} | {r['tpf']:.2f} | {rate} | {times} |"
        )
    return "\n".join(lines)


def _measured_on(results: dict) -> str:
    machine = results["hardware"]
    where = ", ".join(machine.get("gpus") or []) or machine.get("cpu") or "an unnamed CPU"
    prompts = ", ".join(f"{plain(t['name'])} {t['n']:,} prompts" for t in results["tasks"])
    return (
        f"Brackets are 95 % intervals over prompts ({prompts}), paired where systems are compared; one training seed. TPF is "
        "generated tokens over all forward passes. Tokens/s is at batch 1 against the faster of several cached AR loops, on "
        f"{plain(where)}."
    )


def _usage(content: dict) -> str:
    repo = ((content["recipe"].get("publish") or {}).get("repo")) or "OWNER/NAME"
    repo = repo if HUB_ID.fullmatch(repo) else "OWNER/NAME"
    level = next(
        (
            content["effort"]["levels"][k]
            for k in ("low", "medium", "high", "lossless")
            if content["effort"]["levels"].get(k, {}).get("sampler")
        ),
        None,
    )
    sampler, settings = (level["sampler"], level["settings"]) if level else ("verify", {})
    given = "".join(f", {key}={value!r}" for key, value in {"sampler": sampler, **settings}.items())
    return f'''```python
from transformers import AutoModelForCausalLM, AutoTokenizer

repo = "{repo}"
model = AutoModelForCausalLM.from_pretrained(repo)
tokenizer = AutoTokenizer.from_pretrained(repo)
inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "…"}}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
out = model.generate(
    **inputs, max_new_tokens={content["results"]["settings"]["max_new_tokens"]}, custom_generate=repo, trust_remote_code=True{given}
)
print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

`sampler="verify"` gives the model's own autoregressive answer, token for token. Without `custom_generate` the model decodes
one token a forward, as any other does.'''


def _effort(effort: dict) -> str:
    lines = []
    for name, level in effort["levels"].items():
        said = (
            verdict.setting_name(level["sampler"], level["settings"])
            if level.get("sampler")
            else plain(level["reason"])
        )
        lines.append(f"- **{name}**: {said}")
    return "\n".join(lines)


def _limits(results: dict) -> str:
    lines = ["- Measured on the tasks and prompts above only; other uses were not."]
    lines += [f"- Not measured: {plain(m['what'])} ({plain(m['why'])})." for m in results["not_measured"]]
    return "\n".join(lines)


def _origin(content: dict, base: str | None, teacher: str) -> str:
    lines = [f"- Teacher: {teacher}"]
    if not base:
        lines.append(
            "- The header names no `base_model`: the weights came from a local file, which the Hub cannot link."
        )
    licence = content["stages"].get("targets", {}).get("licence") or {}
    named = f" ({plain(licence['name'])})" if licence.get("name") else ""
    asks = f" It asks: {plain(licence['conditions'])}." if licence.get("conditions") else ""
    lines.append(f"- Licence: the teacher's licence{named} and its conditions apply to this student too.{asks}")
    lines += [f"- Stage {plain(stage)}: `{plain(m['hash'])}`" for stage, m in content["stages"].items()]
    lines += [
        f"- Task {plain(t['name'])} version {t['version']}, prompt hash `{plain(t['prompt_hash'])}`"
        for t in content["results"]["tasks"]
    ]
    lines.append(f"- Commit: {plain(content['results']['commit'] or 'an installed package')}")
    return "\n".join(lines)
