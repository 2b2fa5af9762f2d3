"""The command `fewstep`. Imports here are light: each command imports what it needs when it runs."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fewstep.errors import RunFailed, Stopped, UserError

# typer carries a click of its own, and exports the exceptions below but not their base.
ClickException: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="fewstep",
    help="Turn an autoregressive checkpoint into a few-step student: one recipe in, one student and one report out.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value …]", help="dotted recipe keys to set")]
Student = Annotated[str, typer.Argument(metavar="STUDENT", help="a student's folder, or the stage's that made it")]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="where the stages' folders are")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def _run(recipe: str, overrides: list[str] | None, runs: Path, only: str | None = None) -> None:
    from fewstep import machine, signals
    from fewstep.distill.pipeline import run
    from fewstep.distill.recipe import load_recipe

    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' loading bars; stages show their own progress
    signals.install()

    def say(line: str) -> None:
        if machine.rank() == 0:  # under a launcher one rank speaks for all
            print(line, flush=True)

    folders = run(load_recipe(recipe, overrides or []), runs, only, say)
    if only in (None, "report"):
        say(f"report: {folders['report'] / 'report.html'}")
    if only is None:
        say(f"student: {folders['distill' if 'distill' in folders else 'adapt'] / 'student'}")


@app.command("run")
def run_all(recipe: RecipeArgument, overrides: Overrides = None, runs: Runs = Path("runs")) -> None:
    """Run every stage; finished ones are skipped."""
    _run(recipe, overrides, runs)


def _stage_command(stage: str, text: str) -> Callable[..., None]:
    def command(recipe: RecipeArgument, overrides: Overrides = None, runs: Runs = Path("runs")) -> None:
        _run(recipe, overrides, runs, stage)

    command.__doc__ = text
    return app.command(stage)(command)


for _stage, _text in {
    "targets": "Let the teacher answer the prompts.",
    "adapt": "Train the teacher's checkpoint to fill in blocks.",
    "distill": "Train the student to need fewer steps.",
    "eval": "Measure the student against its teacher.",
    "report": "Write the report and the model card anew.",
    "publish": "Upload the student to the Hub.",
}.items():
    _stage_command(_stage, _text)


@app.command()
def plan(recipe: RecipeArgument, overrides: Overrides = None, runs: Runs = Path("runs"), json: AsJson = False) -> None:
    """Show what would run and what it needs."""
    from fewstep.distill.plan import as_text
    from fewstep.distill.plan import plan as make_plan
    from fewstep.distill.recipe import load_recipe

    facts = make_plan(load_recipe(recipe, overrides or []), runs)
    print(_json(facts) if json else as_text(facts))
    if facts["refused"]:
        raise UserError(facts["refused"])


@app.command()
def init(name: Annotated[str, typer.Argument(metavar="NAME", help="the recipe's name; NAME.yaml is written")]) -> None:
    """Write a commented recipe to start from."""
    from fewstep.distill.starter import write_starter

    print(f"wrote {write_starter(name)}; edit it, then: fewstep plan {name}.yaml")


@app.command()
def doctor(runs: Runs = Path("runs"), json: AsJson = False) -> None:
    """Show what this machine has, and what a run would use."""
    from fewstep.distill.doctor import as_text, examine

    facts = examine(runs)
    print(_json(facts) if json else as_text(facts))


@app.command()
def generate(
    student: Student,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="the user's message")],
    sampler: Annotated[
        str | None,
        typer.Option(
            help="ar, verify, threshold (default), fixed, factor, entropy, klass, margin, remask or edit",
            show_default=False,
        ),
    ] = None,
    effort: Annotated[
        str | None,
        typer.Option(help="in place of a sampler, a published student's level: low, medium, high or lossless"),
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="commit what is at least this sure")] = None,
    steps: Annotated[int | None, typer.Option(help="denoising steps a block")] = None,
    setting: Annotated[
        list[str] | None, typer.Option(metavar="NAME=NUMBER", help="another setting of the sampler, such as gamma=0.1")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="default: the student's own")] = None,
    temperature: Annotated[float, typer.Option(help="0: greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="draw from the likeliest tokens that hold this mass")] = 1.0,
    seed: Annotated[int, typer.Option(help="of what is drawn")] = 0,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="end the answer once it holds this")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="the most tokens to generate")] = 128,
    show_steps: Annotated[bool, typer.Option("--show-steps", help="show the text after every forward")] = False,
) -> None:
    """Answer one prompt with a student."""
    from fewstep.distill.answering import answer

    print(
        answer(
            student,
            prompt,
            max_new_tokens,
            show_steps,
            effort,
            given=setting or [],
            stop=stop or [],
            sampler=sampler,
            threshold=threshold,
            steps=steps,
            block_size=block_size,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
    )


@app.command()
def bench(
    student: Student,
    against: Annotated[str | None, typer.Option(metavar="TEACHER", help="time this teacher's AR decoding too")] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="rows with `instruction`; default: eight built-in prompts")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="use only the first rows of --prompts")] = 32,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="the most tokens to generate")] = 128,
    threshold: Annotated[float, typer.Option(min=0.0, max=1.0, help="of the sampler threshold")] = 0.9,
    json: AsJson = False,
) -> None:
    """Time a student at batch 1, beside AR decoding."""
    from fewstep import signals
    from fewstep.distill.bench import as_text, measure

    signals.install()
    facts = measure(student, against, prompts, limit, max_new_tokens, threshold)
    print(_json(facts) if json else as_text(facts))


@app.command()
def serve(
    student: Student,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8000,
    host: Annotated[str, typer.Option(help="the address to listen on")] = "127.0.0.1",
    max_batch: Annotated[int, typer.Option(min=1, help="the most prompts decoded together")] = 8,
) -> None:
    """Serve a student over OpenAI's API (key: FEWSTEP_API_KEY)."""
    from fewstep.distill.answering import student_folder

    folder = student_folder(student)  # before anything heavy is imported
    from fewstep.serve.server import run

    run(folder, host, port, max_batch)


def _json(facts: dict) -> str:
    import json

    return json.dumps(facts, indent=1)


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 the request is wrong, 128 + n stopped by signal n."""
    sys.exit(_exit_code(sys.argv[1:] or ["--help"]))


def _exit_code(arguments: list[str]) -> int:
    try:
        # Not click's own handling: it prints several lines where one says it.
        return app(arguments, prog_name="fewstep", standalone_mode=False) or 0
    except UserError as error:
        return _say(f"error: {error}", 2)
    except ClickException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "fewstep"
        return _say(f"error: {error.format_message().rstrip('.')}; see {command} --help", 2)
    except RunFailed as error:
        return _say(f"failed: {error}", 1)
    except Stopped as error:
        return _say(f"stopped by signal {error.signum}: {error}", 128 + error.signum)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted; the same command goes on from the last saved state", 130)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output left
            sys.stdout = open("/dev/null", "w")
            return 1
        where = f" ({error.filename})" if error.filename else ""
        return _say(f"failed: {error.strerror or error}{where}; free or open that place and run again", 1)


def _say(message: str, code: int) -> int:
    print("fewstep: " + " ".join(message.split()), file=sys.stderr)
    return code
