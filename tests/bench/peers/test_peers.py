"""The peer benchmark runs, its ranks speak the wire, and what has no figures says why."""

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from gateway.wire.vllm.outputs import decode_outputs
from tests.bench.peers import install, markdown, report
from tests.bench.peers.chart import chart
from tests.bench.peers.collect import Collection, Results
from tests.bench.peers.emitter import Rank, Script
from tests.bench.peers.kinds import PEERS, fnv1a
from tests.bench.peers.process import ROOT, PeerError, Process
from tests.bench.peers.scenarios import ALL, RANKS, SCALE
from tests.bench.peers.site import figures
from tests.support.processes import wait_until

CLIENT_BUILDS = shutil.which("gcc") is not None and install.HEADER.exists()
LIGHT = ALL["light"]


class Sent(list):
    """What a rank's socket would have sent."""

    send = list.append


def rank_with(script, *requests):
    rank = Rank(None, 3)
    rank.configure(script)
    rank._outputs = Sent()
    rank.joining = list(requests)
    return rank


def stepped(rank):
    rank._outputs.clear()
    rank.step()
    return decode_outputs(rank._outputs[0], rank._outputs[:1]) if rank._outputs else None


@pytest.mark.e2e
@pytest.mark.skipif(not CLIENT_BUILDS, reason="needs gcc and libnghttp2-dev")
def test_a_quick_run_has_figures_and_writes_its_files(tmp_path):
    out = tmp_path / "result"
    command = [
        sys.executable,
        "-m",
        "tests.bench.peers",
        "--scenarios",
        "light,short",
        "--peers",
        "fast",
        "--repeats",
        "1",
    ]
    done = subprocess.run(
        [*command, "--quick", "--out", out], check=False, cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.with_suffix(".json").read_text())
    assert found["peers"]["fast"]["not_run"] is None
    assert found["direct"]["zmq"] > 0
    light, short = (found["scenarios"][name]["fast"] for name in ("light", "short"))
    assert "failed" not in light | short
    assert 0 < light["ttft_p50_ms"]["median"] <= light["ttft_p99_ms"]["median"]
    for figure in ("us_per_request", "tokens_per_s", "rss_mb"):
        assert short[figure]["median"] > 0
    assert "ours, transport fast" in out.with_suffix(".txt").read_text()
    ET.fromstring(out.with_suffix(".svg").read_text())


def test_a_request_gets_its_tokens_once_and_ends_by_length():
    rank = rank_with(Script(step_ms=20.0), ("a", 3), ("b", 1))
    first, second, third = (stepped(rank) for _ in range(3))
    assert stepped(rank) is None
    assert (first.engine_index, list(first.ids), second.ids, third.ids) == (3, ["a", "b"], ["a"], ["a"])
    assert [[len(tokens) for tokens in batch.token_ids] for batch in (first, second, third)] == [[1, 1], [1], [1]]
    running = first.finish[0]
    assert first.finish[1] == third.finish[0] != running
    assert second.finish == [running]
    assert list(first.cached_tokens) == [0, 0]
    assert (first.load.running, first.lossy, first.fault) == (1, False, None)


def test_tokens_come_in_rows_and_an_aborted_request_sends_none():
    rank = rank_with(Script(tokens_per_row=16), ("a", 64), ("b", 64))
    assert [len(tokens) for tokens in stepped(rank).token_ids] == [16, 16]
    del rank.live["a"]
    assert [stepped(rank).ids for _ in range(3)] == [["b"]] * 3
    assert stepped(rank) is None


def test_held_requests_get_one_token_and_stay():
    rank = rank_with(Script(hold=True), ("a", 1))
    assert len(set(stepped(rank).finish)) == 1
    assert stepped(rank) is None


def test_a_peer_that_is_not_installed_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "VENVS", tmp_path / "none")
    monkeypatch.setattr(install, "FAILURES", tmp_path / "none/failed.json")
    results = Collection(tmp_path, ["short"], ["smg"], repeats=1, quick=True).run()
    assert "not installed" in results.not_run["smg"]
    assert "not run: smg (SMG 1.13 Rust servicer): not installed" in report.table(results)
    assert results.document()["peers"]["smg"]["not_run"] == results.not_run["smg"]


def test_failed_requests_are_no_figures():
    counted = {"requests": 5, "errors": 2, "tokens": 5, "elapsed_s": 1.0, "error": "UNAVAILABLE"}
    with pytest.raises(PeerError, match="2 of 5 requests failed: UNAVAILABLE"):
        figures(LIGHT, counted, 0.1, 50.0, 40.0)
    with pytest.raises(PeerError, match="no token"):
        figures(LIGHT, counted | {"errors": 0, "tokens": 0}, 0.1, 50.0, 40.0)


def test_figures_are_per_token_per_request_and_per_stream():
    counted = {"requests": 10, "errors": 0, "tokens": 640, "elapsed_s": 2.0, "error": ""}
    found = figures(ALL["flood"], counted, 0.064, 60.0, 50.0)
    assert found["us_per_token"] == pytest.approx(100.0)
    assert found["us_per_request"] == pytest.approx(6400.0)
    assert (found["tokens_per_s"], found["requests_per_s"]) == (320.0, 5.0)
    assert found["kb_per_stream"] == pytest.approx(10e3 / 256)


def test_ratios_are_to_the_direct_peer():
    results = Results()
    for peer, costs in (("smg", (8.0, 10.0, 12.0)), ("fast", (4.0, 5.0, 7.0))):
        for cost in costs:
            results.add("flood", peer, lambda cost=cost: {"us_per_token": cost})
    text = report.table(results)
    assert "5.00 [4.00-7.00]" in text
    assert "0.50x" in text
    assert "0.50x" in chart(results)
    assert "| flood, µs/token | 10 [8-12] | 5 [4-7] (0.50x) |  |  |" in markdown.tables(results)


def test_the_cost_of_a_batch_is_the_slope():
    results = Results()
    for ranks in RANKS:
        batches_per_s = ranks * 1e3 / SCALE[f"spread{ranks}"].step_ms
        run = {"tokens_per_s": 12800.0, "us_per_token": 3.0 + 40.0 * batches_per_s / 12800.0}
        results.add(f"spread{ranks}", "fast", lambda run=run: run)
    assert report.batch_cost(results) == pytest.approx((40.0, 3.0))


def test_every_scenario_names_a_figure_that_runs_have():
    assert {scenario.unit for scenario in ALL.values()} <= {name for name, _ in report.COLUMNS}
    assert {"smg", "fast", "python", "grpcio"} == {name for name, peer in PEERS.items() if peer.same_job}


def test_the_hash_is_fnv1a():
    assert fnv1a(b"a") == 0xAF63DC4C8601EC8C


def test_a_paused_peer_stands_still_and_can_be_ended(tmp_path):
    process = Process("0", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "peer.log")
    status = Path(f"/proc/{process.pid}/stat")
    try:
        process.pause()
        wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", "the peer to stand still")
    finally:
        process.stop()
    assert not status.exists()
