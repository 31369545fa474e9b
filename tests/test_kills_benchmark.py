"""benchmarks/kills.py: it kills, resumes, and notices different bytes."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kills

TOY = """
import sys, time
from pathlib import Path
work, faulty = Path(sys.argv[1]), sys.argv[2] == "faulty"
work.mkdir(exist_ok=True)
done = work / "steps"
steps = int(done.read_text()) if done.is_file() else 0
resumed = bool(steps)
if resumed:
    print("resumed at step", steps)
for step in range(steps, 10):
    time.sleep(0.03)
    part = work / "part"
    part.write_text(str(step + 1))
    part.replace(done)
out = Path("models/toy")
out.mkdir(parents=True, exist_ok=True)
(out / "weights").write_text("drifted" if faulty and resumed else "exact")
"""


@pytest.mark.parametrize("kind", ["sound", "faulty"])
def test_a_stage_that_resumes_with_other_bytes_is_noticed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(self: kills.Scratch, stage: str, work: str, *more: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            command = [sys.executable, "-c", TOY, str(self.folder / work), kind]
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)

    monkeypatch.setattr(kills.Scratch, "start", start)
    found = kills.killed(kills.Scratch(tmp_path / "scratch"), "toy", 4, random.Random(1))
    assert (found.kills, found.files) == (4, 1) and found.resumed >= 1 and found.compared >= 1
    assert (found.different > 0) == (kind == "faulty")
    assert ("different bytes" in capsys.readouterr().out) == (kind == "faulty")


def test_moments_follow_a_machine_that_became_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn over the time of a slow first run, all moments would come after the other runs have ended."""

    def start(self: kills.Scratch, stage: str, work: str, *more: str) -> subprocess.Popen[bytes]:
        code = TOY.replace("0.03", "0.3" if work == "whole" else "0.03")
        with self.log.open("ab") as log:
            command = [sys.executable, "-c", code, str(self.folder / work), "sound"]
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)

    monkeypatch.setattr(kills.Scratch, "start", start)
    found = kills.killed(kills.Scratch(tmp_path / "scratch"), "toy", 3, random.Random(1))
    assert found.kills == 3 and found.compared < 8 and found.different == 0


def test_what_a_stage_needs_is_made_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []
    monkeypatch.setattr(kills.Scratch, "whole", lambda self, stage, work: ran.append(stage))
    kills.prepare(kills.Scratch(tmp_path / "scratch"), ["rlhf", "lora"])
    assert ran == [*kills.DATA, "language", "code", "tools", "reward"]
