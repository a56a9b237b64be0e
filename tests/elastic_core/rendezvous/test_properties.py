"""The protocol holds under anything that happens to a run (see `machines`).

A failure prints the blob that reproduces it. `ELASTIC_NIGHTLY=1` runs fifty times as many
examples, and shrinks.
"""

from tests.elastic_core.rendezvous.machines import SETTINGS, BoundedWait, FreeTicks, WakeOnly

TestFreeTicks = FreeTicks.TestCase
TestFreeTicks.settings = SETTINGS
TestWakeOnly = WakeOnly.TestCase
TestWakeOnly.settings = SETTINGS
TestBoundedWait = BoundedWait.TestCase
TestBoundedWait.settings = SETTINGS
