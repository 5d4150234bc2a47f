from __future__ import annotations

from typing import Any

from elastic_train.controller.story import Story


def begun() -> Story:
    story = Story()
    story.begin({"generation": 3, "rank": 1, "layout": {}, "start_step": 10, "store": ["127.0.0.1", 1]})
    return story


def stepped(step: int, *copies: str) -> dict[str, Any]:
    return {"type": "stepped", "generation": 3, "rank": 1, "step": step, "image": "i", "copies": list(copies)}


def steps_told(story: Story) -> list[int]:
    return [entry["message"]["step"] for entry in story.as_message()["steps"]]


def test_step_counts_as_held_when_all_partners_have_it_or_refused_it() -> None:
    story = begun()
    assert story.held_step == 10
    story.told(stepped(11, "b", "c"))
    story.held(3, 11, "b", "image")
    assert story.held_step == 10
    story.held(2, 11, "c", "image")  # of another generation
    assert story.held_step == 10
    story.refused(3, 11, "c")
    assert story.held_step == 11
    story.told(stepped(12))
    assert story.held_step == 12


def test_steps_are_kept_until_their_lines_are_in_storage_and_the_newest_finished_one_longer() -> None:
    story = begun()
    for step in (11, 12, 13):
        story.told(stepped(step))
    assert story.finished_step == 12  # else the image of 13 would not have been written
    story.finished(12, 11)
    assert steps_told(story) == [11, 12, 13]
    story.finished(13, 13)
    assert steps_told(story) == [13]
    assert story.finished_step == 13


def test_what_was_done_is_told_also_when_it_is_over() -> None:
    story = begun()
    story.told({"type": "forked", "pid": 7})
    story.told({"type": "described", "description": "{}"})
    story.told(stepped(11))
    assert story.as_message()["part"] == {"generation": 3, "rank": 1, "layout": {}, "start_step": 10, "running": True}
    words = {"type": "trainer_ended", "generation": 3, "rank": 1, "cause": "SIGKILL"}
    story.told(words)
    told = story.as_message()
    assert not told["part"]["running"]
    assert (told["last_words"], told["trainer_pid"], told["description"]) == ([words], 7, "{}")
    assert steps_told(story) == [11]


def test_host_without_a_part_says_so() -> None:
    assert Story().as_message() == {"type": "story", "part": None}
