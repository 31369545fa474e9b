"""The benchmark of over-optimisation: how it reads the curve of a run."""

from pathlib import Path

from benchmarks import overoptimisation


def written(path: Path, gold: list[str], proxy: list[str]) -> Path:
    lines = ["step,loss,proxy,gold,kl"]
    lines += [f"{10 * n},0.1,{p},{g},{n}.5" for n, (g, p) in enumerate(zip(gold, proxy, strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_gold_that_falls_while_the_proxy_rises_is_seen(tmp_path: Path) -> None:
    rows = overoptimisation.curve(written(tmp_path / "c.csv", ["0.5", "", "0.6", "0.4"], ["0", "", "1", "2"]))
    assert [row["step"] for row in rows] == [0, 20, 30]
    told = overoptimisation.verdict(rows)
    assert told["best"] == {"step": 20, "proxy": 1, "gold": 0.6, "kl": 2.5} and told["overoptimised"] is True


def test_gold_that_falls_with_the_proxy_or_rises_is_not(tmp_path: Path) -> None:
    for gold, proxy in ((["0.5", "0.4"], ["1", "0"]), (["0.5", "0.6"], ["0", "1"])):
        rows = overoptimisation.curve(written(tmp_path / "c.csv", gold, proxy))
        assert overoptimisation.verdict(rows)["overoptimised"] is False
