"""Thin Prefect tasks: one call each, retries, undo beside do."""
