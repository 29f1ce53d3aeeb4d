"""Shell command strings against rules, read by a real grammar and never as text.

What cannot be read, or names its command only at run time, is never allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

LONGEST = 10_000  # characters; a longer command is asked about
WRAPPERS = {"timeout", "time", "nice", "nohup", "stdbuf", "command", "builtin", "noglob", "xargs"}
SAFE_NAMES = {
    "NODE_ENV",
    "LANG",
    "LC_ALL",
    "TZ",
    "CI",
    "NO_COLOR",
    "FORCE_COLOR",
    "TERM",
    "PYTHONUNBUFFERED",
    "RUST_LOG",
}
READERS = {"cat", "head", "tail", "sed", "grep", "less", "more", "wc", "diff", "sort", "uniq"}
RUNS_TEXT = {"eval", "source", ".", "exec", "env", "sudo", "watch", "setsid", "ionice", "flock", "find"}
RUNS_TEXT |= {"bash", "sh", "dash", "zsh", "ksh", "fish"}
HARMLESS_TARGETS = {"/dev/null", "/dev/stdout", "/dev/stderr"}


@dataclass(frozen=True, slots=True)
class Simple:
    """One simple command. A word is None where it is known only at run time; `sets` are the variables set for it."""

    words: tuple[str | None, ...]
    sets: frozenset[str] = frozenset()

    @property
    def bare(self) -> Simple:
        """The command that a wrapper runs, with the last part of its path."""
        words = list(self.words)
        while _name(words) in WRAPPERS:
            wrapper = words.pop(0)
            while words and words[0] is not None and (words[0].startswith("-") or _is_count(wrapper, words[0])):
                words.pop(0)
        return Simple((_name(words), *words[1:]) if words else (), self.sets)

    @property
    def readings(self) -> Iterator[tuple[str | None, ...]]:
        """Every way to read what is run: itself, and each part that another command may be asked to run."""
        words = self.words
        for start in range(len(words) if _name(words) in WRAPPERS | RUNS_TEXT else min(1, len(words))):
            yield words[start:]
            if (name := _name(words[start:])) is not None:
                yield (name, *words[start + 1 :])


def _name(words: Sequence[str | None]) -> str | None:
    """The command's name without its path; None when it is known only at run time."""
    return words[0].rpartition("/")[2] if words and words[0] is not None else None


@dataclass(frozen=True, slots=True)
class Script:
    """All that a command string would run, read and write; `clear` is false where something of it is not known."""

    commands: tuple[Simple, ...]
    writes: tuple[str | None, ...]
    clear: bool

    @property
    def reads(self) -> Iterator[str]:
        """The files that its well-known commands read."""
        for command in self.commands:
            words = command.bare.words
            if words and words[0] in READERS:
                yield from (word for word in words[1:] if word is not None and not word.startswith("-"))


def _is_count(wrapper: str | None, word: str) -> bool:
    return wrapper == "timeout" and re.fullmatch(r"[0-9.]+[smhd]?", word) is not None


@cache
def _parser() -> Parser:
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def read(text: str) -> Script:
    """What the shell would do with `text`."""
    root = _parser().parse(text.encode()).root_node
    commands: list[Simple] = []
    writes: list[str | None] = []
    clear = len(text) <= LONGEST and not root.has_error
    for node in _all(root):
        if node.type == "command":
            commands.append(_simple(node))
        elif node.type == "declaration_command":
            commands.append(Simple((_literal(node.children[0]),)))
        elif node.type == "file_redirect" and any(child.type.startswith((">", "&>")) for child in node.children):
            target = _literal(node.children[-1])
            if target not in HARMLESS_TARGETS and not _is_descriptor(node):
                writes.append(target)
        elif node.type in ("herestring_redirect", "function_definition"):
            clear = False
    return Script(tuple(commands), tuple(writes), clear)


def _is_descriptor(node: Node) -> bool:
    return any(child.type in (">&", "<&") for child in node.children) and node.children[-1].type == "number"


def _all(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _all(child)


def _simple(node: Node) -> Simple:
    words: list[str | None] = []
    names: set[str] = set()
    for child in node.children:
        if child.type == "variable_assignment":
            name = child.child_by_field_name("name")
            names.add(name.text.decode() if name and name.text else "?")
        elif child.type == "command_name":
            words.append(_literal(child.children[0]) if child.children else None)
        elif not child.type.endswith("_redirect"):
            words.append(_literal(child))
    return Simple(tuple(words), frozenset(names))


def _literal(node: Node) -> str | None:
    """The text of a word when the shell has taken its quotes away; None when an expansion makes a part of it."""
    text = node.text.decode() if node.text else ""
    if node.type in ("word", "number", "variable_name", "test_operator") or not node.named_children:
        if node.type == "raw_string":
            return text[1:-1]
        if node.type == "string":
            return _unescaped(text[1:-1], quoted=True)
        return None if re.search(r"(?<!\\)[*?\[{~]", text) and node.type == "command_name" else _unescaped(text)
    if node.type == "string":
        if any(child.type != "string_content" for child in node.named_children):
            return None
        return _unescaped(text[1:-1], quoted=True)
    if node.type in ("concatenation", "command_name"):
        parts = [_literal(child) for child in node.children]
        return None if None in parts else "".join(part for part in parts if part is not None)
    return None


def _unescaped(text: str, *, quoted: bool = False) -> str:
    return re.sub(r'\\([$`"\\\n])' if quoted else r"\\(.)", r"\1", text, flags=re.DOTALL)


# -- rules ------------------------------------------------------------------------------------------------------------


def pattern(text: str) -> tuple[str, ...]:
    """The words of a `Bash(...)` rule; `x:*` at its end is `x *`."""
    return tuple((text[:-2] + " *" if text.endswith(":*") else text).split())


def matches(words: Sequence[str | None], wanted: Sequence[str]) -> bool:
    """Whether a command is what a rule is about; a `*` alone stands for any words, within a word for anything in it."""
    if not wanted:
        return not words
    if wanted[0] == "*":
        return any(matches(words[skipped:], wanted[1:]) for skipped in range(len(words) + 1))
    if not words or words[0] is None:
        return False
    word = re.compile(".*".join(map(re.escape, wanted[0].split("*"))), re.DOTALL)
    return word.fullmatch(words[0]) is not None and matches(words[1:], wanted[1:])


def denied(script: Script, wanted: Sequence[str]) -> bool:
    """Whether a deny or ask rule fires: for any command, wherever in a wrapper's words it begins."""
    return any(matches(words, wanted) for command in script.commands for words in command.readings)


def allowed(script: Script, rules: Sequence[Sequence[str]]) -> bool:
    """Whether allow rules cover all of it: each command by one of them, and nothing that is known only at run time."""
    if not script.clear or not script.commands or None in script.writes:
        return False
    return all(_is_allowed(command, rules) for command in script.commands)


def _is_allowed(command: Simple, rules: Sequence[Sequence[str]]) -> bool:
    bare = command.bare
    if not bare.words or bare.words[0] is None or bare.words[0] in RUNS_TEXT or command.sets - SAFE_NAMES:
        return False
    if command.words[0] is not None and "/" in command.words[0]:
        bare = command  # another program of that name
    return any(matches(bare.words, wanted) for wanted in rules)
