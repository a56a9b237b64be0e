"""What the decisions of agent and coordinator depend on, read off the settings."""

from __future__ import annotations

from elastic_core.agent.events import AgentPolicy
from elastic_core.agent.settings import AgentSettings
from elastic_core.rendezvous.events import CoordinatorPolicy


def policy_of(settings: AgentSettings) -> AgentPolicy:
    """Return what the agent's decisions depend on."""
    grace = settings.waits.stop_grace
    return AgentPolicy(
        slots=settings.slots,
        api=settings.api,
        stop_grace=grace,
        outcome_timeout=settings.waits.stop + 15,
        partial_exit=settings.waits.partial_exit,
    )


def coordinator_policy_of(settings: AgentSettings) -> CoordinatorPolicy:
    """Return what the coordinator's decisions depend on."""
    waits = settings.waits
    return CoordinatorPolicy(
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        last_call=waits.last_call,
        join_timeout=waits.join,
        probe_timeout=waits.probe,
        max_restarts=settings.max_restarts,
        no_progress_limit=settings.no_progress_limit,
        stop_timeout=waits.stop,
        sizes=settings.sizes,
        partial_exit=waits.partial_exit,
        changes_per_hour=settings.changes_per_hour,
    )
