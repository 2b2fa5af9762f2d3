"""Loading, under the short name that evaluation and commands use."""

from fewstep.students.convert import load_causal_lm, load_student

__all__ = ["load_causal_lm", "load_student"]
