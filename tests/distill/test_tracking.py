"""The report in W&B: verdicts, settings and the page itself, with what it was made from."""

import json
from types import SimpleNamespace

import pytest

from fewstep.distill import tracking
from fewstep.distill.config import TrackConfig

ROW = {"task": "t", "system": "student", "sampler": "threshold", "settings": {"threshold": 0.9}, "score": 0.5,
       "score_ci": [0.4, 0.6], "tpf": 3.0, "other": "left out"}  # fmt: skip
RUN = {"name": "r-report", "group": "r", "job_type": "report", "config": {"seed": 0}}


@pytest.fixture
def report(tmp_path):
    folder = tmp_path / "report-12345678"
    folder.mkdir()
    content = {"results": {"verdicts": [{"text": "helped"}], "rows": [ROW]}}
    (folder / "report.json").write_text(json.dumps(content))
    (folder / "report.html").write_text("<p>page")
    (folder / "MODEL_CARD.md").write_text("card")
    return folder


class Tracked:
    def __init__(self, mode):
        self.settings, self.summary = SimpleNamespace(mode=mode), {}
        self.logged, self.used, self.made, self.finished = {}, [], [], False

    def log(self, values):
        self.logged |= values

    def use_artifact(self, artifact):
        self.used.append(artifact.name)

    def log_artifact(self, artifact):
        self.made.append(artifact)

    def finish(self):
        self.finished = True


@pytest.mark.parametrize(("mode", "used"), [("offline", []), ("online", ["targets-1", "distill-2"])])
def test_a_report_closes_the_lineage(report, monkeypatch, tmp_path, mode, used):
    tracked = Tracked(mode)
    monkeypatch.setattr(tracking, "_start_wandb", lambda *given: tracked)
    tracking.track_report(
        report, TrackConfig(wandb={"project": "p"}), RUN, [tmp_path / "targets-1", tmp_path / "distill-2"]
    )
    assert tracked.finished and tracked.summary == {"verdict/0": "helped"} and tracked.used == used
    (artifact,) = tracked.made
    assert (
        artifact.name == report.name
        and artifact.type == "report"
        and artifact.metadata["read"] == ["targets-1", "distill-2"]
    )
    assert set(artifact.manifest.entries) == {"report.html", "report.json", "MODEL_CARD.md"}
    table = tracked.logged["settings"]
    assert dict(zip(table.columns, table.data[0])) == {
        **dict.fromkeys(tracking.COLUMNS), **{k: ROW[k] for k in ("task", "system", "sampler", "score", "tpf")},
        "settings": '{"threshold": 0.9}', "score_ci": "[0.4, 0.6]",
    }  # fmt: skip


def test_it_is_written_offline_and_trouble_costs_a_line(report, monkeypatch, capfd):
    import wandb

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_DATA_DIR", str(report / "trainer_state" / "data"))
    monkeypatch.setenv("WANDB_ARTIFACT_DIR", str(report / "trainer_state" / "artifacts"))
    config = TrackConfig(wandb={"project": "p", "mode": "online"})
    tracking.track_report(report, TrackConfig(), RUN, [])
    assert not (report / "wandb_run_id").exists()  # no project: nothing
    tracking.track_report(report, config, RUN, [])
    assert list((report / "trainer_state").rglob("*.wandb")) and "W&B" not in capfd.readouterr().err

    def broken(*_, **__):
        raise RuntimeError("no")

    monkeypatch.setattr(wandb, "Table", broken)
    tracking.track_report(report, config, RUN, [])
    assert "W&B: RuntimeError: no" in capfd.readouterr().err
