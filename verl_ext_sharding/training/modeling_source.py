"""What a modeling file of transformers does with masks and positions, read from its source: no model is built.

transformers keeps packed sequences apart in two places, and a model takes part in each by what it hands on: mask builders find
the restarts of `position_ids`, flash attention finds them among the keywords of the attention call. Whether a model hands
them on is written in its modeling file and nowhere else. What can't be read counts as not handed on.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import ModuleType

from torch import nn
from transformers import PreTrainedModel, masking_utils

MASK_BUILDERS = frozenset(
    name
    for name, function in vars(masking_utils).items()
    if name.startswith("create_")
    and inspect.isfunction(function)
    and {"position_ids", "attention_mask"} <= set(inspect.signature(function).parameters)
)
"""Functions of transformers that turn positions into causal masks: `create_causal_mask` and others."""

_POSITIONS = "position_ids"
_ATTENTION_CALLS = frozenset({"attention_interface", "_flash_attention_forward"})
_MASKS = frozenset({"attention_mask", "causal_mask"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class ModelingSource:
    """The part of a modeling file that a model class uses.

    Args:
        root: The model class; of its file only what can be reached from it by name is read.
    """

    def __init__(self, root: type) -> None:
        self.module: ModuleType = sys.modules[root.__module__]
        self.definitions = tuple(_reachable(_definitions(root.__module__), root.__name__))

    def mask_calls(self) -> list[bool]:
        """For each call of a mask builder, whether it gets `position_ids`; False for a use that is no plain call."""
        found = []
        for definition in self.definitions:
            names = {node for node in _walk(definition) if isinstance(node, ast.Name) and node.id in MASK_BUILDERS}
            for scope in (node for node in _walk(definition) if isinstance(node, _Function)):
                aliases, values = _aliases(scope)
                names -= values
                for call in _calls(scope):
                    if isinstance(call.func, ast.Name) and call.func.id in MASK_BUILDERS | aliases:
                        names.discard(call.func)
                        found.append(_passes_positions(call, scope))
            found += [False] * len(names)
        return found

    def layer_that_reads_the_mask(self) -> str | None:
        """Name of a layer class that looks into its mask (`attention_mask.dtype`, `attention_mask[...]`), or None."""
        for layer in self._layers():
            for node in ast.walk(layer):
                if isinstance(node, ast.Attribute | ast.Subscript) and _names(node.value) & _MASKS:
                    return layer.name
        return None

    def layer_that_counts_in_the_row(self) -> str | None:
        """Name of an attention class that numbers the tokens of the row itself (`torch.arange`), or None."""
        for layer in self._layers():
            calls = [call for scope in _functions(layer) if scope.name != "__init__" for call in _calls(scope)]
            names = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
            if {"attention_interface", "arange"} <= names:
                return layer.name
        return None

    def positions_reach_attention(self) -> bool:
        """Whether `position_ids` is among the keywords of each layer's call and of each attention call.

        Of the keywords that a function does not name itself it hands on all, as `**kwargs`.
        """
        loops = [
            call
            for loop in (node for root in self.definitions[:1] for node in ast.walk(root))
            if isinstance(loop, ast.For)
            for call in _calls(loop)
            if _names(call.func) & _names(loop.target)
        ]
        attention = [
            (call, scope)
            for layer in self._layers()
            for scope in _functions(layer)
            for call in _calls(scope)
            if _names(call.func) & _ATTENTION_CALLS
        ]
        return all(_POSITIONS in _keywords(call) for call in loops) and all(
            _POSITIONS in _keywords(call) or (None in _keywords(call) and _POSITIONS not in _parameters(scope))
            for call, scope in attention
        )

    def _layers(self) -> list[ast.ClassDef]:
        """Modules of the model that are no models themselves."""
        models = self._classes(PreTrainedModel)
        return [layer for layer in self._classes(nn.Module) if layer not in models]

    def _classes(self, base: type) -> list[ast.ClassDef]:
        found = []
        for definition in self.definitions:
            if isinstance(definition, ast.ClassDef):
                cls = getattr(self.module, definition.name, None)
                if isinstance(cls, type) and issubclass(cls, base):
                    found.append(definition)
        return found


@lru_cache(maxsize=8)
def _definitions(module_name: str) -> dict[str, ast.stmt]:
    """Top-level classes, functions and variables of a module by name; empty where its source can't be read."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module_name]))
    except (OSError, TypeError, SyntaxError):
        return {}
    found: dict[str, ast.stmt] = {}
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef | _Function):
            found[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            found |= {name: statement for target in statement.targets for name in _names(target)}
    return found


def _reachable(definitions: dict[str, ast.stmt], root: str) -> Iterator[ast.stmt]:
    waiting, seen = [root], {root}
    while waiting:
        definition = definitions.get(waiting.pop())
        if definition is None:
            continue
        yield definition
        used = {node.id for node in _walk(definition) if isinstance(node, ast.Name)} - seen
        seen |= used
        waiting.extend(sorted(used))


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, but for what says nothing of a forward pass.

    `_init_weights` is one function for a model and its towers, and a method with the name of a mask builder serves `generate`.
    """
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, _Function) and child.name in {"_init_weights", *MASK_BUILDERS}):
            yield from _walk(child)


def _functions(definition: ast.AST) -> Iterator[_Function]:
    return (node for node in ast.walk(definition) if isinstance(node, _Function))


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (child for child in ast.walk(node) if isinstance(child, ast.Call))


def _keywords(call: ast.Call) -> set[str | None]:
    """Names of a call's keywords; None stands for `**`."""
    return {keyword.arg for keyword in call.keywords}


def _parameters(scope: _Function) -> set[str]:
    arguments = scope.args
    return {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _names(node: ast.AST) -> set[str]:
    """The variables that an expression can be: `a`, either of `a if x else b`, each of `a, b`; none of anything else."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.IfExp):
        return _names(node.body) | _names(node.orelse) if _names(node.body) and _names(node.orelse) else set()
    if isinstance(node, ast.Tuple):
        return set().union(*(_names(item) for item in node.elts))
    return set()


def _assigned(scope: _Function, name: str) -> list[ast.expr]:
    """Every value that a function assigns to a variable."""
    values = []
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values += [node.value for target in targets if _names(target) == {name}]
    return values


def _aliases(scope: _Function) -> tuple[set[str], set[ast.AST]]:
    """Variables of a function that hold a mask builder whatever branch is taken, and the nodes of the values they get."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(node.value)
    held = {
        name: given
        for name, given in values.items()
        if all(_names(value) and _names(value) <= MASK_BUILDERS for value in given)
    }
    return set(held), {node for given in held.values() for value in given for node in ast.walk(value)}


def _passes_positions(call: ast.Call, scope: _Function) -> bool:
    for keyword in call.keywords:
        if keyword.arg == _POSITIONS:
            return not _is_none(keyword.value)
        if keyword.arg is None and _holds_positions(keyword.value, scope):
            return True
    return False


def _holds_positions(value: ast.expr, scope: _Function, followed: Sequence[str] = ()) -> bool:
    """Whether a dict has the key `position_ids`: a literal, a copy of one that has, or a variable that only holds such."""
    if isinstance(value, ast.Dict):
        return any(
            _holds_positions(item, scope, followed)
            if key is None
            else isinstance(key, ast.Constant) and key.value == _POSITIONS and not _is_none(item)
            for key, item in zip(value.keys, value.values, strict=True)
        )
    if isinstance(value, ast.Name) and value.id not in followed:
        assigned = _assigned(scope, value.id)
        return bool(assigned) and all(_holds_positions(item, scope, (*followed, value.id)) for item in assigned)
    if isinstance(value, ast.Call):
        function = value.func
        copied = function.value if isinstance(function, ast.Attribute) and function.attr == "copy" else None
        if copied is None and _names(function) == {"dict"} and value.args:
            copied = value.args[0]
        named = any(keyword.arg == _POSITIONS and not _is_none(keyword.value) for keyword in value.keywords)
        return named or (copied is not None and _holds_positions(copied, scope, followed))
    return False


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
