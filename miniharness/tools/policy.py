"""Rules and hooks together: what is to be done with a call, and who is told how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miniharness.tools import hooks as hook_side
from miniharness.tools import rules as rule_side
from miniharness.tools.config import Approvals, Config, Limits, Risk
from miniharness.tools.hooks import Hook, Hooks, Verdict
from miniharness.tools.names import agents_run
from miniharness.tools.rules import Behavior, Call, Decision, Rule, Rules

NOTHING_SAID = Verdict()


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules, hooks and limits of a folder, who answers, and what the hooks said of one call before it."""

    rules: Rules
    hooks: Hooks
    limits: Limits
    people: Approvals
    said: Verdict = NOTHING_SAID

    @classmethod
    def of(cls, config: Config) -> Policy:
        """The policy of a folder.

        Raises:
            UsageError: rules or hooks in harness.toml are wrong.
        """
        return cls(rule_side.load(config), hook_side.load(config), config.harness.limits, config.harness.approvals)

    @property
    def unsupported(self) -> Sequence[str]:
        """What was read and is not applied."""
        return [*self.rules.unsupported, *self.hooks.unsupported]

    @property
    def broken(self) -> Sequence[str]:
        """Why every write is denied."""
        return list(dict.fromkeys([*self.rules.broken, *self.hooks.broken]))

    @classmethod
    def of_the_program(cls) -> Policy:
        """The policy of a program that asks nobody: its own call is the permit."""
        calls = Rule(Behavior.ALLOW, "what the program calls", "the program", lambda call: True)
        return cls(Rules([calls]), Hooks(), Limits(calls_per_run=None, block_repeats=False), Approvals())

    async def before(self, call: Call, run_id: str) -> tuple[Policy, Mapping[str, Any]]:
        """Ask the hooks; returns this policy with what they said, and the arguments as they want them."""
        said = await self.hooks.say("PreToolUse", _seen(call, run_id))
        return replace(self, said=said), call.arguments if said.arguments is None else said.arguments

    def decide(self, call: Call, risk: Risk = "side-effect") -> Decision:
        """The stricter of what rules and hooks say; a hook's allow never skips a rule."""
        if self.hooks.broken and risk != "read":
            reason = f"a hook file cannot be read, so every write is denied: {self.hooks.broken[0]}"
            return Decision(Behavior.DENY, reason)
        decision, order = self.rules.decide(call, risk), list(Behavior)
        if self.said.behavior == "none" or order.index(decision.behavior) <= order.index(Behavior(self.said.behavior)):
            return decision
        return Decision(Behavior(self.said.behavior), self.said.reason or f"a hook says {self.said.behavior}")

    async def answer(self, call: Call, run_id: str) -> Verdict:
        """What the hooks answer to a question for a person. They cannot change what was asked."""
        said = await self.hooks.say("PermissionRequest", _seen(call, run_id))
        if said.arguments is not None:
            return Verdict("deny", "a PermissionRequest hook wants other arguments than the run has")
        return said

    async def after(self, call: Call, run_id: str, **what: Any) -> None:
        """Tell the hooks how it ended, `response` or `error`; nothing that they say changes it."""
        event = "PostToolUseFailure" if "error" in what else "PostToolUse"
        told = {"error": what["error"]} if "error" in what else {"tool_response": what["response"]}
        await self.hooks.say(event, _seen(call, run_id) | told)

    async def stop(self, agents_run: str) -> None:
        """Tell the hooks that the run of an agent makes no more calls."""
        await self.hooks.say("Stop", {"session_id": agents_run, "stop_hook_active": False} | _where())

    def also(self, hooks: Sequence[Hook]) -> Policy:
        """This policy with hooks of the program."""
        return replace(self, hooks=replace(self.hooks, hooks=[*self.hooks.hooks, *hooks]))


def _where() -> dict[str, Any]:
    return {"cwd": str(Path.cwd()), "permission_mode": "default"}


def _seen(call: Call, run_id: str) -> dict[str, Any]:
    """What a hook is told of a call."""
    named = {"tool_name": call.tool, "tool_input": dict(call.arguments), "tool_use_id": run_id}
    named["session_id"] = agents_run(run_id) or run_id
    return named | _where()
