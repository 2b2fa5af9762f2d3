"""The systems that are compared: their models, and the prompts as each of them sees them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fewstep import chat
from fewstep.errors import UserError
from fewstep.students.convert import load_student
from fewstep.students.decoding.weights import column_major
from fewstep.teachers.config import TargetsConfig, TeacherConfig
from fewstep.teachers.hf import device, torch_dtype
from fewstep.teachers.load import load_for_stage
from fewstep.teachers.prompts import teacher_prompts


class Models:
    """The systems' models, each loaded when first asked for."""

    def __init__(
        self, teacher: TeacherConfig, targets_folder: Path, targets: TargetsConfig, students: Mapping[str, Path]
    ):
        self._teacher, self._targets_folder, self._targets, self._students = teacher, targets_folder, targets, students
        self._loaded: dict[str, tuple[Any, Any]] = {}

    def get(self, system: str) -> tuple[Any, Any]:
        """Return (model, tokenizer) of `teacher`, `student` or `undistilled`."""
        if system not in self._loaded:
            if system == "teacher":
                model, tokenizer = load_for_stage(self._teacher, self._targets_folder)
                placed = self._teacher.quantize is not None or self._teacher.device_map is not None
                self._loaded[system] = model if placed else column_major(model), tokenizer
            else:
                model, tokenizer = load_student(self._students[system], torch_dtype(self._teacher.dtype))
                self._loaded[system] = column_major(model.to(device())), tokenizer
        return self._loaded[system]

    def drop(self, system: str) -> None:
        """Free a model that is not needed any more."""
        self._loaded.pop(system, None)

    def prompts(self, system: str, items: Sequence[Any]) -> list[list[int]]:
        """Return the [N] prompts as the system sees them: the teacher's with its own few-shot turns.

        Raises:
            UserError: a prompt does not fit the model's context.
        """
        model, tokenizer = self.get(system)
        if system == "teacher":
            tools = [item.tools for item in items]
            prompts = teacher_prompts(tokenizer, [item.messages for item in items], self._targets, tools)
        else:
            prompts = [chat.encode_prompt(tokenizer, item.messages, item.tools) for item in items]
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        for item, prompt in zip(items, prompts):
            if context is not None and len(prompt) >= context:
                raise UserError(
                    f"eval.tasks: prompt {item.id} has {len(prompt)} tokens for the {system}, whose context holds {context}; "
                    "remove the row or shorten it"
                )
        return prompts
