"""A job file that is right, for tests that break one thing in it."""

from __future__ import annotations

GOOD = """\
name: good
model:
  preset: tiny
data:
  uri: data
  sequence_length: 32
training:
  steps: 100
  global_batch: 8
  micro_batch: 1
"""
