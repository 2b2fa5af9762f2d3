"""`fewstep init`: a commented recipe that loads as it is written."""

import re
from pathlib import Path

from fewstep.errors import UserError

STARTER = """\
# {name}: fewstep plan {name}.yaml shows what this would do; fewstep run {name}.yaml does it.
# Every key with its default and meaning: docs/recipes.md. Paths are relative to this file.
name: {name}
seed: 0

teacher:
  model: HuggingFaceTB/SmolLM2-135M-Instruct  # a Hub id, a folder, a .gguf file, package://module/file.gguf, or a server's URL
  revision: null                              # a Hub commit; set it, so that the run can be repeated

prompts:
  path: prompts.jsonl    # one object per line; write this file: {{"instruction": "…", "reference": …}}
  field: instruction     # the key that holds the user's message
  held_out: 0.05         # share kept for the loss that is shown while training
  checker: null          # exact, json or booking: scores the teacher's answers against `reference`

targets:                 # what the teacher answers
  max_new_tokens: 128
  temperature: 0.0       # 0: greedy
  top_logprobs: 16       # kept per token, for the objective kd
  # system_prompt: ...   # the teacher sees it and the student does not; few_shot: turns.jsonl likewise

student:
  attention: block       # sees the whole clean prefix, and its own block in both directions
  block_size: 16         # 8 for 10M parameters, 16 for 135M, 32 from 1.5B

adapt:                   # from an AR checkpoint to one that fills in blocks
  max_steps: 400
  batch_tokens: 4096     # positions per optimizer step
  learning_rate: 1e-4    # 3e-4…1e-3 below 30M parameters, 1e-4 to 0.6B, 1e-5 from 1.5B
  objectives: {{ce: 1.0, ar: 1.0}}
  lora: null             # {{rank: 64}}; {{rank: 64, gated: true}} keeps the teacher's own answers under `verify`

distill:                 # fewer steps at the same quality; null leaves this stage out
  max_steps: 200
  order: trajectory
  objectives: {{ce: 1.0, ar: 1.0, kd: 0.5, certainty: {{from: 0.0, to: 1.0, temperature: 0.5}}}}

engine:
  name: deepspeed        # or plain: one process, no DeepSpeed
  zero_stage: 1
  precision: auto        # fp32 on a CPU, bf16 on a GPU

eval:
  tasks:
    - {{name: booking, path: eval.jsonl}}  # a file of eval/tasks, and its prompts: not those of training
  samplers:
    - {{name: threshold, threshold: [0.5, 0.7, 0.9, 0.95]}}
    - {{name: verify}}     # token for token what the student answers one token at a time
  baselines: [teacher, undistilled]

track:
  wandb: {{project: null, mode: offline}}

publish:
  repo: null             # owner/name on the Hub; null: nothing is uploaded
  private: true
"""


def write_starter(name: str) -> Path:
    """Write `<name>.yaml` in the working folder and return its path.

    Raises:
        UserError: the name is no name, or the file is there already.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"NAME {name!r}: must be letters, digits, . _ or -; it becomes the recipe's name and NAME.yaml")
    file = Path(f"{name}.yaml")
    try:
        with open(file, "x", encoding="utf-8") as handle:
            handle.write(STARTER.format(name=name))
    except FileExistsError:
        raise UserError(f"{file} exists; give another name or remove it") from None
    return file
