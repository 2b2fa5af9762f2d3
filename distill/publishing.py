"""Publish: the student, its report and its calibrated settings become one Hub repository."""

import json
import os
import shutil
from pathlib import Path

from fewstep.distill.config import PublishConfig
from fewstep.errors import RunFailed, UserError, first_line

UNNAMED = "OWNER/NAME"  # stands in a model card for the repository
LEFT_OUT = {"adapter"}  # a merged adapter: for further training, not for use


def run(folder: Path, config: PublishConfig, student: Path, report: Path, effort: Path) -> dict:
    """Assemble `repository/` and upload it.

    Args:
        folder: the stage's own.
        student: the student's folder, an ordinary checkpoint with `custom_generate/`.
        report: folder with report.html, report.json and MODEL_CARD.md.
        effort: effort.json; its levels go into the published generation_config.json.

    Returns:
        The repository's name, its address and the commit.

    Raises:
        UserError: without a token, or where the Hub refuses it.
        RunFailed: where the Hub cannot be reached.
    """
    if config.repo is None:
        raise UserError("publish.repo: null; name the Hub repository, such as publish.repo=owner/name")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError

    repository = assemble(folder / "repository", student, report, effort, config.repo)
    api = HfApi()
    try:
        address = api.create_repo(config.repo, private=config.private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=config.repo, folder_path=str(repository), commit_message="Publish the student and its report"
        )
    except LocalTokenNotFoundError:
        raise UserError(f"publish.repo={config.repo}: no Hub token; set HF_TOKEN or run `hf auth login`") from None
    except HFValidationError as error:
        raise UserError(f"publish.repo={config.repo}: {first_line(error)}; write it as owner/name") from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        reason = first_line(error)
        if status in (401, 403):
            raise UserError(
                f"publish.repo={config.repo}: the Hub refuses ({reason}); set HF_TOKEN to a token that may write there"
            ) from None
        raise RunFailed(f"publish {config.repo}: {reason}; the same command tries again") from None
    except (OSError, HTTPError) as error:
        raise RunFailed(
            f"publish {config.repo}: the Hub cannot be reached ({type(error).__name__}); the same command tries again"
        ) from None
    return {"repo": config.repo, "url": str(address), "commit": commit.oid, "private": config.private}


def assemble(repository: Path, student: Path, report: Path, effort: Path, repo: str) -> Path:
    """Write the folder that is uploaded: a plain checkpoint at its root, nothing that changes a plain load."""
    shutil.rmtree(repository, ignore_errors=True)
    shutil.copytree(student, repository, ignore=shutil.ignore_patterns(*LEFT_OUT), copy_function=_link)
    card = (report / "MODEL_CARD.md").read_text(encoding="utf-8")
    (repository / "README.md").write_text(
        card.replace(UNNAMED, repo), encoding="utf-8"
    )  # the report knows no repository
    for name in ("report.html", "report.json"):
        shutil.copyfile(report / name, repository / name)
    file = repository / "generation_config.json"
    settings = json.loads(file.read_text())
    settings["fewstep_effort"] = json.loads(effort.read_text())["levels"]
    settings.pop("_from_model_config", None)  # a config marked so loses the keys it does not know
    file.unlink()
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return repository


def _link(source: str, target: str) -> None:
    """Link weights instead of copying them, where the file system can."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
