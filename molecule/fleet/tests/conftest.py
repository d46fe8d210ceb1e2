"""The fleet that the scenario made."""

from __future__ import annotations

from collections.abc import Iterator

import fleet as machines
import pytest
from fleet_view import Fleet, kill


@pytest.fixture(scope="session")
def _fleet() -> Fleet:
    fleet = Fleet()
    machines.configure_front(fleet.front_backend())
    fleet.take_over()
    return fleet


@pytest.fixture
def fleet(_fleet: Fleet) -> Iterator[Fleet]:
    """The fleet, whole: every replica in, every node in HAProxy. No playbook outlives its test."""
    try:
        _fleet.releases()
    except AssertionError:
        # A test that failed may have left a replica out; those after it are about something else.
        _fleet.rollout()
        _fleet.releases()
    _fleet.wait_for_front()
    yield _fleet


@pytest.fixture(autouse=True)
def no_playbook_is_left() -> Iterator[None]:
    count = len(machines.started)
    yield
    for playbook in machines.started[count:]:
        kill(playbook)
