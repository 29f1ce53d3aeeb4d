"""Paths in rules: gitignore patterns, checked as the path is written and as it is resolved."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pathspec import GitIgnoreSpec

Access = Literal["read", "edit"]


@dataclass(frozen=True, slots=True)
class PathRule:
    """A gitignore pattern below `anchor`. One that denies fires if the path or what it resolves to matches, one that
    allows needs both."""

    anchor: Path
    spec: GitIgnoreSpec
    denies: bool

    @classmethod
    def of(cls, pattern: str, folder: Path, *, denies: bool) -> PathRule:
        """The rule of a pattern in a settings file of `folder`.

        `//path` begins at the root of the file system, `~/path` at the home folder, `/path` at `folder`; `path` and
        `./path` at the working directory, where a bare name is meant at any depth.
        """
        if pattern.startswith("//"):
            return cls(Path("/"), _spec(pattern[1:]), denies)
        if pattern.startswith("~/"):
            return cls(Path.home(), _spec(pattern[1:]), denies)
        if pattern.startswith("/"):
            return cls(folder.absolute(), _spec(pattern), denies)
        pattern = pattern.removeprefix("./")
        if not denies and pattern.endswith("/**") and "/" not in pattern[:-3]:
            pattern = f"/{pattern}"  # an allowed folder is that one; a denied one is denied at any depth
        elif denies and pattern.endswith("/**") and "/" not in pattern[:-3]:
            pattern = f"**/{pattern}"
        return cls(Path.cwd(), _spec(pattern), denies)

    def matches(self, path: str) -> bool:
        """Whether the rule is about that path."""
        written = Path(os.path.abspath(Path(path).expanduser()))
        found = [self._below(written), self._below(resolved(written))]
        return any(found) if self.denies else all(found)

    def _below(self, path: Path) -> bool:
        for anchor in {self.anchor, resolved(self.anchor)}:
            if path.is_relative_to(anchor) and self.spec.match_file(path.relative_to(anchor).as_posix()):
                return True
        return False


def resolved(path: Path) -> Path:
    """Where a path leads: its deepest part that exists without symbolic links, and the rest as it is."""
    return Path(os.path.realpath(path))


def _spec(pattern: str) -> GitIgnoreSpec:
    return GitIgnoreSpec.from_lines([pattern])
