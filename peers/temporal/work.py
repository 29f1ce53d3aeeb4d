"""The workflow of every command. It is a file of its own because the sandbox loads it anew for each run."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow


@workflow.defn
class Work:
    """Durable steps, one after the other."""

    @workflow.run
    async def run(self, steps: int) -> None:
        """Take the steps."""
        for number in range(steps):
            inputs = [workflow.info().workflow_id, number]
            await workflow.execute_activity("step", args=inputs, start_to_close_timeout=timedelta(seconds=5))
