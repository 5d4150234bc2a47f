"""What the coordinator sends to a host must not grow with the number of hosts; seconds are in benchmarks/."""

from __future__ import annotations

from pathlib import Path

from benchmarks.control_plane import make_data, measure


def test_eight_times_the_hosts_lose_a_hundredth_and_each_is_told_as_much_as_before(tmp_path: Path) -> None:
    make_data(tmp_path)
    few, many = measure(tmp_path, 64), measure(tmp_path, 512)
    assert (few["hosts"], many["hosts"]) == (64, 512)
    assert (few["lost"], many["lost"]) == (1, 6)
    assert many["ranks"] > 6 * few["ranks"] > 0
    assert many["message_kb"] < 1.5 * few["message_kb"] < 1.5
    assert few["directions"] == few["ranks"]
    assert many["directions_kb"] < 1.5 * few["directions_kb"]
