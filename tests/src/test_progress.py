"""Long work without a terminal: a line every 30 seconds and one at the end."""

from fewstep import progress as module
from fewstep.progress import progress


def test_lines_come_every_30_seconds_with_rate_and_time_left(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress("adapt", 1000, "tokens") as p:
        for _ in range(8):
            now[0] += 10
            p.advance(125, note="loss 0.31")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "adapt: 375/1,000 tokens, 12.5 tokens/s, 0:50 left, loss 0.31",
        "adapt: 750/1,000 tokens, 12.5 tokens/s, 0:20 left, loss 0.31",
        "adapt: 1,000/1,000 tokens, 12.5 tokens/s, took 1:20, loss 0.31",
    ]
