"""What stands around a line of the user's code: conditions, loops, and exits before it."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Around", "around"]

#: Names with which scripts ask for the rank.
_RANK = re.compile(
    r"is_(local_)?(main|last)_process|is_main|process_index|\b(local_|global_)?rank\b|get_rank|master", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Around:
    """Something that decides whether a line runs.

    Args:
        kind: "if", "else" (of an ``if``), "exit" (an ``if`` before it that leaves), "except", or "loop".
        line: Where it begins.
        end: Its last line.
        text: The condition, or the loop's head.

    Example:
        >>> Around("if", 3, 5, "accelerator.is_main_process").about_rank
        True
    """

    kind: str
    line: int
    end: int
    text: str

    @property
    def about_rank(self) -> bool:
        """Whether it asks which rank this is."""
        return self.kind in ("if", "else", "exit") and bool(_RANK.search(self.text))

    def __str__(self) -> str:
        if self.kind == "loop":
            return f"the loop `{self.text}` (line {self.line})"
        words = {"if": "", "else": "the else of ", "exit": "the exit in ", "except": ""}[self.kind]
        return f"{words}`{'except' if self.kind == 'except' else 'if'} {self.text}:` (line {self.line})"


def around(file: str, line: int) -> list[Around]:
    """What decides whether a line runs, within its function, outermost first; empty if there is no source.

    Args:
        file: The source; a notebook's cell is found, too, in the process of the notebook.
        line: Its line, from 1.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    found: list[Around] = []
    for node in _path(tree, line):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            found.clear()
        found += _deciding(node, line)
    return found


def _path(tree: ast.AST, line: int) -> Iterator[ast.AST]:
    """The nodes that contain a line, outermost first."""
    node: ast.AST | None = tree
    while node is not None:
        yield node
        node = next((child for child in ast.iter_child_nodes(node) if _has(child, line)), None)


def _has(node: ast.AST, line: int) -> bool:
    start = getattr(node, "lineno", None)
    return start is not None and start <= line <= (getattr(node, "end_lineno", None) or start)


def _deciding(node: ast.AST, line: int) -> Iterator[Around]:
    for block in ("body", "orelse", "handlers", "finalbody"):
        statements = getattr(node, block, None)
        if not isinstance(statements, list) or not any(_has(s, line) for s in statements):
            continue
        if isinstance(node, ast.If):
            yield _around("if" if block == "body" else "else", node, node.test)
        elif isinstance(node, (ast.For, ast.AsyncFor)) and block == "body":
            yield _around("loop", node, node.iter, f"for {ast.unparse(node.target)} in ")
        elif isinstance(node, ast.While) and block == "body":
            yield _around("loop", node, node.test, "while ")
        for statement in statements:
            if getattr(statement, "lineno", line) >= line:
                break
            if isinstance(statement, ast.If) and isinstance(
                statement.body[-1], (ast.Return, ast.Continue, ast.Break, ast.Raise)
            ):
                yield _around("exit", statement, statement.test)
    if isinstance(node, ast.ExceptHandler):
        yield _around("except", node, node.type)
    elif isinstance(node, ast.stmt) and not hasattr(node, "body"):
        for part in ast.walk(node):
            if isinstance(part, ast.IfExp) and part.lineno == line:
                yield _around("if", part, part.test)


def _around(kind: str, node: ast.AST, expression: ast.expr | None, before: str = "") -> Around:
    text = before + ("" if expression is None else ast.unparse(expression))
    text = text if len(text) <= 80 else f"{text[:77]}..."
    line = getattr(node, "lineno", 0)
    return Around(kind, line, getattr(node, "end_lineno", None) or line, text)
