from __future__ import annotations

import math
import random
import statistics

import pytest

from elastic_train.config.faults import Kind
from elastic_train.config.time_causes import Cause
from elastic_train.planner.simulation.costs import Costs, Pace, Pause, Saves, Tiers
from elastic_train.planner.simulation.events import replay, simulate
from elastic_train.planner.simulation.failures import Distribution, Failure, Failures
from elastic_train.planner.simulation.repair import Repair
from elastic_train.planner.simulation.scenario import Growth, Outcome
from elastic_train.planner.simulation.throughput import proportional
from tests.planner.simulation.scenarios import PAUSE, failure, scenario


def spent(outcome: Outcome) -> dict[str, float]:
    return {cause.value: pytest.approx(seconds) for cause, seconds in outcome.seconds.items()}


def test_without_failures_all_time_is_useful() -> None:
    outcome = replay(scenario(), [])
    assert outcome.seconds == {Cause.USEFUL: pytest.approx(8 * 1000.0)}
    assert (outcome.goodput, outcome.ettr, outcome.progress, outcome.steps) == (1.0, 1.0, 1.0, 100)


def test_a_killed_trainer_costs_the_step_in_flight_and_the_pause() -> None:
    outcome = replay(scenario(), [failure(503.0, Kind.KILL_TRAINER)])
    parts = {"detection": 8.0, "teardown": 16.0, "form": 24.0, "restore": 32.0, "first_step": 40.0}
    assert spent(outcome) == {"useful": 8 * (500 + 482), "lost_step": 8 * 3.0, **parts}
    assert (outcome.steps, outcome.steps_lost, outcome.interruptions) == (98, 0, 1)
    assert outcome.ettr == pytest.approx(0.982)


def test_the_time_in_which_a_job_runs_and_waits() -> None:
    rigid = scenario(throughput=proportional(8, 8), saves=Saves(100.0, 25.0, 25.0))
    outcome = replay(rigid, [failure(500.0, Kind.KILL_NODE)])
    assert (outcome.running, outcome.waiting) == (pytest.approx(1000 - 120 - 15), pytest.approx(0.12))


def test_a_drain_costs_no_step() -> None:
    outcome = replay(scenario(spares=1), [failure(503.0, Kind.DRAIN, seconds=25.0)])
    assert Cause.LOST_STEP not in outcome.seconds
    assert outcome.seconds[Cause.USEFUL] == pytest.approx(8 * 985)


def test_a_notice_too_short_for_a_step_and_the_pause_is_none() -> None:
    """A step takes 10 s, the pause 15 s."""
    outcome = replay(scenario(spares=1), [failure(503.0, Kind.DRAIN, seconds=24.0)])
    assert outcome.seconds[Cause.LOST_STEP] == pytest.approx(8 * 3.0)
    alone = scenario(tiers=Tiers(partners=0))
    assert replay(alone, [failure(590.0, Kind.DRAIN, seconds=24.0)]).from_storage == 1
    assert replay(alone, [failure(590.0, Kind.DRAIN, seconds=25.0)]).from_storage == 0


@pytest.mark.parametrize(("notice", "away"), [(30.0, 100.0), (90.0, 100.0), (250.0, 250.0)])
def test_another_node_is_asked_for_when_the_notice_comes(notice: float, away: float) -> None:
    outcome = replay(scenario(), [failure(500.0, Kind.DRAIN, seconds=notice)])
    assert outcome.host_seconds == pytest.approx(8 * 1000 - 2 * away)


def test_a_failure_within_a_pause_begins_another_one() -> None:
    outcome = replay(scenario(), [failure(500.0, Kind.KILL_TRAINER), failure(502.0, Kind.KILL_TRAINER)])
    assert outcome.seconds[Cause.DETECTION] == pytest.approx(2 * 8.0)
    assert outcome.seconds[Cause.TEARDOWN] == pytest.approx(8 * (1 + 2))
    assert outcome.seconds[Cause.USEFUL] == pytest.approx(8 * (500 + 483))
    assert outcome.interruptions == 2


def test_a_lost_node_without_a_spare_slows_the_job_until_another_comes() -> None:
    slow = scenario(growth=Growth(margin=0.0))
    outcome = replay(slow, [failure(500.0, Kind.KILL_NODE)])
    # 6 hosts pause until 515 and work in steps of 13.3 s; at 600 a node is there, at 620 ready, the pause ends at 635
    assert outcome.seconds[Cause.START] == pytest.approx(2 * 20.0)
    assert outcome.seconds[Cause.USEFUL] == pytest.approx(8 * 500 + 6 * 105 + 8 * 365)
    assert Cause.LOST_STEP not in outcome.seconds
    assert outcome.steps == 50 + 44  # 105 / 13.3 + 36.5 = 44.4
    assert outcome.host_seconds == pytest.approx(8 * 500 + 6 * 100 + 8 * 400)


def test_what_a_newcomer_would_gain_is_less_than_a_pause() -> None:
    outcome = replay(scenario(growth=Growth(horizon=20.0)), [failure(500.0, Kind.KILL_NODE)])
    assert outcome.seconds[Cause.IDLE_SPARE] == pytest.approx(2 * 380.0)


def test_a_spare_takes_over_at_once_and_its_own_loss_harms_nobody() -> None:
    outcome = replay(scenario(spares=1), [failure(300.0, Kind.KILL_NODE, 4), failure(700.0, Kind.KILL_NODE, 1)])
    assert (outcome.interruptions, outcome.failures) == (1, 2)
    assert outcome.ettr == pytest.approx(0.985)
    # the spare: 300 s idle, 100 s away, 20 s starting, 280 s idle; then the lost member's place likewise
    assert outcome.seconds[Cause.IDLE_SPARE] == pytest.approx(2 * (300 + 280 + 180))
    assert outcome.seconds[Cause.START] == pytest.approx(2 * 40)


def test_too_few_hosts_wait() -> None:
    rigid = scenario(throughput=proportional(8, 8))
    outcome = replay(rigid, [failure(500.0, Kind.KILL_NODE)])
    assert outcome.seconds[Cause.WAITING] == pytest.approx(6 * 120.0)
    assert outcome.ettr == pytest.approx((1000 - 120 - 15) / 1000)


def test_a_killed_host_is_back_after_a_while() -> None:
    outcome = replay(scenario(growth=Growth(margin=0.0)), [failure(500.0, Kind.KILL_HOST)])
    assert outcome.host_seconds == pytest.approx(8 * 1000 - 30)
    assert outcome.seconds[Cause.START] == pytest.approx(20.0)


def test_a_broken_trainer_that_needs_repair_takes_its_node_away_but_not_the_memory() -> None:
    outcome = replay(scenario(tiers=Tiers(partners=0)), [failure(500.0, Kind.KILL_TRAINER, repair=True)])
    assert outcome.host_seconds == pytest.approx(8 * 1000 - 2 * 100)
    assert outcome.from_storage == 0


@pytest.mark.parametrize(
    ("tiers", "lost", "from_storage"),
    [
        (Tiers(), [0], 0),
        (Tiers(), [0, 2], 0),  # not neighbours: each has its copy
        (Tiers(), [0, 1], 1),  # node 1 held the copy of node 0
        (Tiers(), [3, 0], 1),  # the ring closes
        (Tiers(partners=2), [0, 1], 0),
        (Tiers(partners=2), [0, 1, 2], 1),
        (Tiers(partners=0), [0], 1),
        (Tiers(memory=False), [0], 1),
    ],
)
def test_which_losses_go_to_storage(tiers: Tiers, lost: list[int], from_storage: int) -> None:
    outcome = replay(scenario(tiers=tiers), [failure(590.0, Kind.KILL_NODE, node) for node in lost])
    assert outcome.from_storage == from_storage
    # saves begin at 100, 200, ... and take 10 s: that of step 50 is the newest
    assert outcome.steps_lost == (9 if from_storage else 0)


@pytest.mark.parametrize(("lost", "from_storage"), [([0, 1], 1), ([0, 1, 2, 3], 1), ([0, 2], 0)])
def test_copies_that_go_while_the_job_waits_are_gone(lost: list[int], from_storage: int) -> None:
    rigid = scenario(throughput=proportional(8, 8))
    outcome = replay(rigid, [failure(590.0 + 5 * number, Kind.KILL_NODE, node) for number, node in enumerate(lost)])
    assert outcome.interruptions == 1
    assert (outcome.from_storage, outcome.steps_lost) == (from_storage, 9 * from_storage)


def test_a_copy_on_a_node_that_the_pause_left_out_goes_with_it() -> None:
    """Without node 2 the job is one of two replicas, on 0 and 1; node 3 idles, and has the only copy of node 2's."""
    pairs = scenario(throughput=proportional(8, 4, 4), growth=Growth(horizon=0.0))
    first = failure(590.0, Kind.KILL_NODE, 2)
    assert replay(pairs, [first, failure(592.0, Kind.KILL_NODE, 0)]).from_storage == 0  # 1 and 3 have all
    assert replay(pairs, [first, failure(606.0, Kind.KILL_NODE, 3)]).interruptions == 1  # 0 and 1 have it all by then
    outcome = replay(pairs, [first, failure(592.0, Kind.KILL_NODE, 3)])
    assert (outcome.from_storage, outcome.steps_lost, outcome.interruptions) == (1, 9, 2)
    assert outcome.seconds[Cause.TEARDOWN] == pytest.approx(4 * (1.0 + 2.0))


def test_spares_hold_no_state() -> None:
    """The spare's loss is long past and nobody's when its neighbour on the ring goes."""
    lost = [failure(100.0, Kind.KILL_NODE, 4), failure(900.0, Kind.KILL_NODE, 3)]
    outcome = replay(scenario(spares=1), lost)
    assert (outcome.from_storage, outcome.steps_lost, outcome.interruptions) == (0, 0, 1)
    at_once = replay(scenario(spares=1), [failure(590.0, Kind.KILL_NODE, 3), failure(590.0, Kind.KILL_NODE, 0)])
    assert at_once.from_storage == 1  # the copies of 3 are on 0, whatever place the spare has


def test_what_a_drained_node_hands_on_is_lost_with_the_last_node() -> None:
    lone = scenario(nodes=1, throughput=proportional(2), saves=Saves(every=100.0, seconds=10.0))
    outcome = replay(lone, [failure(590.0, Kind.KILL_TRAINER, repair=True)])
    assert (outcome.from_storage, outcome.steps_lost) == (1, 9)
    pair = scenario(nodes=2, throughput=proportional(4))
    first, second = failure(590.0, Kind.KILL_TRAINER, repair=True), failure(595.0, Kind.KILL_NODE, 1)
    assert replay(pair, [first]).from_storage == 0
    assert replay(pair, [first, second]).from_storage == 1


def test_a_drain_that_leaves_too_few_hosts_saves_the_newest_step_first() -> None:
    lone = scenario(nodes=1, throughput=proportional(2))
    outcome = replay(lone, [failure(593.0, Kind.DRAIN, seconds=30.0)])
    assert (outcome.from_storage, outcome.steps_lost) == (1, 0)
    # away for 100 s, 20 s of start, 15 s of pause and 7 s more to read; the step goes on where it was
    assert outcome.ettr == pytest.approx((1000 - 100 - 20 - 15 - 7) / 1000)
    rigid = scenario(throughput=proportional(8, 8))
    others = [failure(595.0, Kind.KILL_NODE, node) for node in (1, 2, 3)]
    assert replay(rigid, [failure(593.0, Kind.DRAIN, seconds=30.0), *others]).steps_lost == 0
    assert replay(rigid, [failure(593.0, Kind.KILL_NODE), *others]).steps_lost == 9


def test_a_recovery_that_had_to_wait_takes_as_long_as_its_failure_does() -> None:
    costs = Costs(dict.fromkeys(Kind, PAUSE), growth=Pause(form=1.0), per_host=0.0)
    outcome = replay(scenario(throughput=proportional(8, 8), costs=costs), [failure(500.0, Kind.KILL_NODE)])
    assert outcome.ettr == pytest.approx((1000 - 120 - 15) / 1000)


def test_a_save_under_way_does_not_count() -> None:
    storage = scenario(tiers=Tiers(memory=False))
    assert replay(storage, [failure(509.0, Kind.KILL_TRAINER)]).steps_lost == 10
    assert replay(storage, [failure(511.0, Kind.KILL_TRAINER)]).steps_lost == 1


def test_repeated_steps_are_replayed_time_and_storage_takes_longer() -> None:
    outcome = replay(scenario(tiers=Tiers(memory=False)), [failure(590.0, Kind.KILL_TRAINER)])
    assert outcome.seconds[Cause.REPLAYED] == pytest.approx(8 * 90.0)
    assert outcome.seconds[Cause.RESTORE] == pytest.approx(8 * (4.0 + 7.0))
    assert outcome.progress == pytest.approx((59 + (1000 - 590 - 22 - 90) // 10) / 100)


def test_saves_that_stall() -> None:
    outcome = replay(scenario(saves=Saves(100.0, 25.0, 25.0)), [])
    # 8 cycles of 125 s
    assert outcome.seconds[Cause.CHECKPOINT_STALL] == pytest.approx(8 * 8 * 25.0)
    assert outcome.steps == 80
    struck = replay(scenario(saves=Saves(100.0, 25.0, 25.0), tiers=Tiers(memory=False)), [failure(240.0, Kind.HANG)])
    assert struck.steps_lost == 10  # in the stall of the second save


def test_waits_within_a_step_are_not_useful() -> None:
    outcome = replay(scenario(pace=Pace(10.0, {Cause.DATA_WAIT: 0.1})), [])
    assert spent(outcome) == {"useful": 7200.0, "data_wait": 800.0}


def test_the_start_and_the_end_of_a_run() -> None:
    outcome = replay(scenario(start=100.0, finish=5.0, spares=1), [])
    assert spent(outcome) == {
        "start": 10 * 100.0,
        "useful": 8 * 900.0,
        "idle_spare": 2 * 900.0,
        "finishing": 10 * 5.0,
    }


def test_what_costs_nothing_interrupts_nothing() -> None:
    harmless = scenario(costs=Costs({Kind.HANG: PAUSE}))
    outcome = replay(harmless, [failure(500.0, Kind.KILL_COORDINATOR), failure(600.0, Kind.STORE_OUTAGE)])
    assert outcome.goodput == 1.0


def test_a_trace_hits_whom_its_pick_says() -> None:
    spare = scenario(spares=1)
    last = replay(spare, [failure(500.0, Kind.KILL_HOST, None, pick=0.99)])
    assert (last.interruptions, last.host_seconds) == (0, pytest.approx(10 * 1000 - 30))
    assert replay(spare, [failure(500.0, Kind.KILL_HOST, None, pick=0.1)]).interruptions == 1
    assert replay(spare, [failure(500.0, Kind.KILL_TRAINER, None, pick=0.99)]).interruptions == 1  # spares have none


def _chaos(chance: random.Random) -> list[Failure]:
    kinds = [kind for kind in Kind if kind not in (Kind.KILL_COORDINATOR, Kind.STORE_OUTAGE)]
    times = sorted(chance.uniform(0, 1000) for _ in range(40))
    return [
        Failure(at, chance.choice(kinds), chance.random(), chance.choice([None, 0, 1, 2, 3, 4]), chance.uniform(0, 50))
        for at in times
    ]


@pytest.mark.parametrize("seed", range(50))
def test_every_second_of_every_host_has_a_cause(seed: int) -> None:
    """Whatever happens, the account is that of the hosts that were there, and history ends where it ends."""
    chance = random.Random(seed)
    stormy = scenario(spares=1, growth=Growth(margin=chance.choice([0.0, 1.0])), repair=Repair(chance.uniform(0, 200)))
    outcome = replay(stormy, _chaos(chance), history=True)
    assert all(seconds >= 0 for seconds in outcome.seconds.values())
    assert outcome.host_seconds <= 10 * 1000 * (1 + 1e-9)
    assert outcome.progress <= outcome.ettr + 1e-9 <= 1 + 1e-9
    assert outcome.moments[-1] == (1000.0, outcome.seconds)
    times = [at for at, _ in outcome.moments]
    assert times == sorted(times)
    without = scenario(spares=1, repair=Repair(0.0), host_return=0.0, newcomer=0.0)
    calm = replay(without, [each for each in _chaos(chance) if each.kind in (Kind.KILL_TRAINER, Kind.HANG)])
    assert calm.host_seconds == pytest.approx(10 * 1000)


@pytest.mark.parametrize("shape", [1.0, 0.7, 2.0])
def test_failures_come_at_their_rate_from_the_first_day(shape: float) -> None:
    """Also for Weibull's: nodes are of random age at the start."""
    failures = Failures(mtbf=100.0, distribution=Distribution(shape))
    drawn = failures.draw(2000, 50.0, seed=1)
    early = sum(each.at < 10.0 for each in drawn)
    assert len(drawn) == pytest.approx(2000 * 0.5, rel=0.1)
    assert early == pytest.approx(2000 * 0.1, rel=0.2)


def test_a_node_meets_the_same_failures_whatever_else_there_is() -> None:
    failures = Failures(mtbf=100.0, spot=0.001, rack_nodes=4, rack_mtbf=200.0)
    few, many = failures.draw(8, 500.0, seed=3), failures.draw(12, 500.0, seed=3)
    assert [each for each in many if each.node is not None and each.node < 8] == few
    assert failures.draw(8, 500.0, seed=3) == few != failures.draw(8, 500.0, seed=4)


def test_a_rack_fails_as_a_whole() -> None:
    drawn = Failures(rack_nodes=4, rack_mtbf=1000.0).draw(10, 3000.0, seed=1)
    groups = {(each.node, *each.beside) for each in drawn}
    assert groups == {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)}
    outcome = replay(scenario(spares=4), [failure(590.0, Kind.KILL_NODE, 0, beside=(1, 2))])
    assert (outcome.failures, outcome.interruptions, outcome.from_storage) == (1, 1, 1)
    assert outcome.ettr == pytest.approx((1000 - 15 - 7 - 90) / 1000)  # one pause, from storage; 9 steps again
    assert replay(scenario(), [failure(590.0, Kind.KILL_NODE, 3, beside=(8,))]).from_storage == 0


def test_as_many_failures_are_drawn_as_are_expected() -> None:
    failures = Failures(mtbf=1000.0, spot=0.001, rack_nodes=3, rack_mtbf=500.0)
    assert failures.expected(10, 1000.0) == pytest.approx(10 + 10 + 4 * 2)
    drawn = [len(failures.draw(10, 1000.0, seed)) for seed in range(200)]
    assert statistics.fmean(drawn) == pytest.approx(28, abs=3 * (28 / 200) ** 0.5)


def test_a_step_that_is_repeated_at_the_end_is_not_useful() -> None:
    storage = scenario(tiers=Tiers(memory=False), duration=620.0)
    outcome = replay(storage, [failure(590.0, Kind.KILL_TRAINER)])  # until 612, then 8 s of step 51, again
    assert outcome.seconds[Cause.REPLAYED] == pytest.approx(8 * 8.0)
    assert outcome.ettr == pytest.approx(590 / 620)


def test_spot_nodes_are_taken_with_notice() -> None:
    drawn = Failures(spot=0.01, notice=30.0).draw(10, 1000.0, seed=1)
    assert len(drawn) == pytest.approx(100, abs=3 * math.sqrt(100))
    assert {(each.kind, each.seconds) for each in drawn} == {(Kind.DRAIN, 30.0)}


def test_the_same_seed_gives_the_same_run() -> None:
    failing = scenario(failures=Failures(mtbf=500.0))
    assert simulate(failing, 1) == simulate(failing, 1) != simulate(failing, 2)
