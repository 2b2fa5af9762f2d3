"""What can be found wrong before any work: each fault in one line, and nothing is written.

`chain` has already found missing or broken files and teachers that are no decoder-only LM; here are
the names that must be known, prompts that do not fit the context, and the room on the disk.
"""

import json
from pathlib import Path
from typing import Any

import fewstep
from fewstep.checkers import CHECKERS
from fewstep.distill.chain import Stage
from fewstep.distill.estimate import estimate
from fewstep.distill.recipe import Recipe, nearest
from fewstep.errors import UserError
from fewstep.eval import tasks_by_name
from fewstep.runstore import require_disk
from fewstep.students.families import PROBED
from fewstep.teachers import endpoint, vllm
from fewstep.teachers.equivalence import same_tokenizer
from fewstep.teachers.filters import check_references, make_filter
from fewstep.teachers.hf import require_quantizer
from fewstep.teachers.licences import check_licence
from fewstep.teachers.load import describe, kind_of, licence, load_config, load_tokenizer, plain_weights
from fewstep.teachers.prompts import Prompt, read_few_shot, read_prompts

TEMPLATE_ROOM = 96  # tokens that a chat template may add around the messages; beyond it the template is applied


def check(recipe: Recipe, stages: dict[str, Stage], runs: Path, todo: list[str]) -> None:
    """Raise UserError for the first thing that would make one of the stages `todo` fail."""
    _names_are_known(recipe)
    if runs.exists() and not runs.is_dir():
        raise UserError(f"--runs {runs} is a file; give a folder")
    if not todo:
        return
    if "eval" in todo and not recipe.eval.tasks:
        raise UserError("eval.tasks is empty; name at least one task, such as {name: booking, path: eval.jsonl}")
    facts = describe(*recipe.reference)
    if recipe.student.base is not None:
        base = describe(str(recipe.student.base))
        if base["vocab_size"] != facts["vocab_size"]:
            raise UserError(
                f"student.base {recipe.student.base}: its vocabulary has {base['vocab_size']} entries and the teacher's "
                f"{facts['vocab_size']}; give a checkpoint with the teacher's tokenizer"
            )
        if kind_of(str(recipe.student.base)) == "gguf":
            plain_weights(str(recipe.student.base))
        if {"targets", "adapt"} & set(todo) and not recipe.teacher.is_endpoint:
            base = str(recipe.student.base)
            same_tokenizer(load_tokenizer(*recipe.reference), load_tokenizer(base), recipe.teacher.model, base)
    if "adapt" in todo:
        _converts(recipe)
    if "targets" in todo:
        given = recipe.teacher
        if given.is_endpoint:
            endpoint.check(given)
            _chat_keeps_no_tools(recipe)
        require_quantizer(given.quantize)
        if given.runtime == "vllm":
            vllm.check(given)
        check_licence(given, licence(given))
    if "targets" in todo or "eval" in todo:
        _tools_are_shown(recipe)
        _prompts_fit(recipe, facts["context_length"])
    sizes = estimate(recipe, facts)
    require_disk(runs, sum(sizes[name].disk for name in todo), f"{recipe.name} ({', '.join(todo)})")


def _tools_are_shown(recipe: Recipe) -> None:
    """Encode one row for each list of tools, with the teacher's template and that of the student's base."""
    asked = {}
    for source in (recipe.prompts, *(task.prompts for task in recipe.eval.tasks)):
        for prompt in read_prompts(source):
            if prompt.tools:
                asked.setdefault(json.dumps(prompt.tools), (source.place, prompt))
    if not asked:
        return
    from fewstep.chat import Untold, encode_prompt

    models = {recipe.reference: "the teacher"} | (
        {(str(recipe.student.base), None): "the student"} if recipe.student.base else {}
    )
    for model, who in models.items():
        tokenizer = load_tokenizer(*model)
        for place, prompt in asked.values():
            try:
                encode_prompt(tokenizer, prompt.messages, prompt.tools)
            except Untold as error:
                raise UserError(
                    f"{place}, line {prompt.line}: its prompt has tools, and {who} cannot be shown them: {error}; give a checkpoint "
                    "whose template shows tools, or remove `tools`"
                ) from None


def _chat_keeps_no_tools(recipe: Recipe) -> None:
    if recipe.teacher.endpoint.api != "chat":
        return
    told = next((prompt for prompt in read_prompts(recipe.prompts) if prompt.tools), None)
    if told is not None:
        raise UserError(
            f"{recipe.prompts.place}, line {told.line}: its prompt has tools, and a chat server takes their calls out of its text; "
            "set teacher.endpoint.api to completions"
        )


def _converts(recipe: Recipe) -> None:
    """Probe a small random model of the base's class; one that the tests have probed needs no imports here."""
    base = recipe.student.base
    model, revision = (recipe.teacher.model, recipe.teacher.revision) if base is None else (str(base), None)
    if describe(model, revision)["model_type"] in PROBED:
        return
    from fewstep.students.probe import why_class_not_convertible

    reason = why_class_not_convertible(load_config(model, revision))
    if reason:
        key = "teacher.model" if base is None else "student.base"
        raise UserError(f"{key} {model}: cannot become a student: {reason}; give one whose layers are attention")


def _names_are_known(recipe: Recipe) -> None:
    """Check the names that stand for files of a room, and what only a stage under way would read."""
    if recipe.prompts.checker is not None:
        _one_of("prompts.checker", recipe.prompts.checker, sorted(CHECKERS))
    make_filter(recipe.prompts, recipe.targets)
    check_references(recipe.prompts.checker, read_prompts(recipe.prompts), recipe.prompts.place)
    for place, task in enumerate(recipe.eval.tasks):
        _one_of(f"eval.tasks.{place}.name", task.name, _files_of("eval", "tasks"))
        tasks_by_name.find(task.name).load(task.path, task.field, task.limit)
    for stage, config in recipe.training().items():
        for name in config.objectives:
            _one_of(f"{stage}.objectives", name, [n for n in _files_of("distill", "objectives") if n != "rows"])


def _files_of(*room: str) -> list[str]:
    """Return the names of the Python files in a folder of a room."""
    files = (f for place in fewstep.__path__ for f in Path(place, *room).glob("*.py"))
    return sorted(f.stem for f in files if not f.stem.startswith("_"))


def _one_of(key: str, name: str, known: list[str]) -> None:
    if name not in known:
        near = nearest(name, known)
        raise UserError(
            f"{key}: {name!r} is unknown; " + (f"did you mean {near}?" if near else f"known: {', '.join(known)}")
        )


def _prompts_fit(recipe: Recipe, context: int | None) -> None:
    """Check that every prompt and its answer fit the teacher's context."""
    if context is None:
        return
    few_shot = read_few_shot(recipe.targets.few_shot)
    if recipe.targets.system_prompt is not None:
        few_shot = [{"role": "system", "content": recipe.targets.system_prompt}, *few_shot]
    answer = recipe.targets.max_new_tokens
    tokenizer = _Tokenizer(recipe)
    _fit(
        tokenizer,
        read_prompts(recipe.prompts),
        few_shot,
        context,
        answer,
        recipe.prompts.place,
        "targets.max_new_tokens",
    )
    answer = recipe.eval.max_new_tokens or answer
    for task in recipe.eval.tasks:
        rows = read_prompts(task.prompts)
        # A booking task's messages are the prompts as they stand; the teacher sees its few-shot turns here too.
        _fit(tokenizer, rows, few_shot, context, answer, f"{task.path}", "eval.max_new_tokens")


def _fit(
    tokenizer: "_Tokenizer", prompts: list[Prompt], few_shot: list[dict], context: int, answer: int, file: str, key: str
) -> None:
    first = sum(len(m["content"].encode()) for m in few_shot)
    messages_room = (len(few_shot) + 1) * 16 + TEMPLATE_ROOM
    for prompt in prompts:
        # No tokenizer makes more tokens of a text than it has bytes, so short prompts need none.
        tools = len(json.dumps(prompt.tools)) if prompt.tools else 0
        num_bytes = first + sum(len(m["content"].encode()) for m in prompt.messages) + tools
        if num_bytes + messages_room + answer <= context:
            continue
        num = tokenizer.count([*few_shot, *prompt.messages], most=context - answer, tools=prompt.tools)
        if num + answer > context:
            raise UserError(
                f"{file}, line {prompt.line}: {num} tokens with what the teacher sees before it, and an answer of up to "
                f"{answer}, exceed the teacher's context of {context}; shorten the prompt or lower {key}"
            )


class _Tokenizer:
    """Counts a prompt's tokens; loads as little as the question needs."""

    def __init__(self, recipe: Recipe):
        self.reference = recipe.reference
        self._fast: Any = None
        self._full: Any = None
        model, _ = recipe.reference
        file = Path(model) / "tokenizer.json"
        if kind_of(model) == "hf" and file.is_file():
            from tokenizers import Tokenizer

            self._fast = Tokenizer.from_file(str(file))

    def count(self, messages: list[dict], most: int, tools: list[dict] | None = None) -> int:
        """Return the tokens of a prompt: exact near the limit `most`, an upper bound well below it."""
        if self._fast is not None and not tools:
            text = sum(len(self._fast.encode(m["content"], add_special_tokens=False).ids) for m in messages)
            bound = text + len(messages) * 16 + TEMPLATE_ROOM
            if bound <= most:
                return bound
        if self._full is None:
            from fewstep.teachers.load import load_tokenizer

            self._full = load_tokenizer(*self.reference)
        from fewstep.chat import encode_prompt

        return len(encode_prompt(self._full, messages, tools))
