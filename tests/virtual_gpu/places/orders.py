"""Wrong orders at every place: an event recorded too early, a wait too late, a wrong stream, calls swapped.

Every recorded event, wait and stream of the product is such a place. Calls are swapped in the files that launch
messages, if the second one makes no use of what the first one assigns.
"""

import ast
from collections.abc import Callable, Iterator
from functools import partial

MESSAGES_IN = (
    "runtime/comm.py",
    "runtime/exchange.py",
    "runtime/all_to_all.py",
    "runtime/transport/nccl.py",
    "runtime/weight_grad_store.py",
    "model/ops.py",
    "features/comm_priority/comm_scheduler.py",
    "features/comm_priority/grad_reduction.py",
)
"""Files in which the order of messages is made."""
WAITS = frozenset({"wait_event", "wait_stream", "block", "block_current", "synchronize"})
_SENDS = frozenset(
    {
        *("launch", "launch_counts", "_launch_pending", "_let_pending_launch", "exchange_counts", "_launch_up_to"),
        *("all_to_all_single", "copy_", "issued", "passed", "_start", "_launch", "wait_for_launch", "wait"),
        *("advance_window", "record", "record_stream", *WAITS),
    }
)
"""Calls that launch messages, wait for them, or say between which of them others run."""
_FRESH, _CURRENT = "torch.cuda.Stream()", "torch.cuda.current_stream()"
_EARLY = "_before_all_kernels"

type Change = Callable[[], None]
type _Function = ast.FunctionDef


def wrong_orders(file: str, function: _Function, block: list[ast.stmt], index: int) -> Iterator[tuple[str, Change]]:
    """Yields the mutants of a statement: the fault, and a function that changes the tree."""
    statement = block[index]
    following = block[index + 1] if index + 1 < len(block) else None
    if _method(statement) == "record" and index:
        yield "recorded before the line above", partial(_move_behind, block, index - 1, index)
    if _makes_ready_event(statement):
        yield "recorded when the function begins", partial(_record_first, function, block, index)
    if _only_waits(statement) and following is not None:
        yield "behind the line below", partial(_move_behind, block, index, index + 1)
    for call, fault, change in _wrong_streams(statement):
        yield f"{fault}: {ast.unparse(call)}", change
    if file in MESSAGES_IN:
        yield from _late_calls(block, index)


def _late_calls(block: list[ast.stmt], index: int) -> Iterator[tuple[str, Change]]:
    """Yields a statement that sends or waits behind the next one that does, and the end of a queue before its start."""
    statement = block[index]
    for call in _own_calls(statement):
        if _name_of(call) == "popleft":
            yield "the last one first", partial(setattr, call.func, "attr", "pop")
    others = [place for place in range(index + 1, len(block)) if _sends(block[place])]
    if _only_waits(statement) or not _sends(statement) or not others:
        return
    if others[0] == index + 1 and _method(block[index + 1]) == "record":
        return  # the event is then recorded before the line above
    between = block[index + 1 : others[0] + 1]
    if all(not _targets(statement) & _read(one) for one in between):
        line = ast.unparse(between[-1]).splitlines()[0]
        yield f"behind {line}", partial(_move_behind, block, index, others[0])


def _wrong_streams(statement: ast.stmt) -> Iterator[tuple[ast.Call, str, Change]]:
    """Yields calls of a statement that name a stream, or mean the current one, each with another stream."""
    for call in _own_calls(statement):
        name, target = _name_of(call), ast.unparse(call.func)
        if target == "torch.cuda.stream" or name == "record_stream":
            yield call, "of another stream", partial(setattr, call, "args", [_expression(_FRESH)])
        elif name == "record" and not call.args:
            yield call, "on another stream", partial(setattr, call, "args", [_expression(_FRESH)])
        elif name == "record_event":
            yield call, "on another stream", partial(setattr, call.func, "value", _expression(_FRESH))
        elif name == "block" and call.args and ast.unparse(call.args[0]) != _CURRENT:
            yield call, "of the current stream", partial(setattr, call, "args", [_expression(_CURRENT)])
        elif name == "wait_stream":
            yield call, "the wrong way round", partial(_turn_round, call)


def _sends(statement: ast.stmt) -> bool:
    """Whether a statement, which does not leave the function, launches a message or waits for one."""
    if isinstance(statement, ast.FunctionDef | ast.Try):
        return False
    nodes = list(ast.walk(statement))
    leaves = any(isinstance(node, ast.Return | ast.Raise | ast.Yield) for node in nodes)
    return not leaves and any(isinstance(node, ast.Call) and _name_of(node) in _SENDS for node in nodes)


def _targets(statement: ast.stmt) -> set[str]:
    """Names and attributes that a statement assigns."""
    stored = (node for node in ast.walk(statement) if isinstance(getattr(node, "ctx", None), ast.Store))
    return {ast.unparse(node) for node in stored if not isinstance(node, ast.Tuple)}


def _read(statement: ast.stmt) -> set[str]:
    """Names and attributes that a statement reads."""
    loaded = (node for node in ast.walk(statement) if isinstance(getattr(node, "ctx", None), ast.Load))
    return {ast.unparse(node) for node in loaded}


def _only_waits(statement: ast.stmt) -> bool:
    """Whether a statement is a wait, or an ``if`` of which every branch is one."""
    if isinstance(statement, ast.If):
        branches = (statement.body, statement.orelse) if statement.orelse else (statement.body,)
        return all(len(branch) == 1 and _only_waits(branch[0]) for branch in branches)
    return _method(statement) in WAITS


def _makes_ready_event(statement: ast.stmt) -> bool:
    is_assignment = isinstance(statement, ast.Assign)
    return is_assignment and any(ast.unparse(call.func) == "ReadyEvent" for call in _own_calls(statement))


def _own_calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Calls of a statement without the bodies that it has."""
    if isinstance(statement, ast.If | ast.While):
        parts: list[ast.AST] = [statement.test]
    elif isinstance(statement, ast.With):
        parts = [item.context_expr for item in statement.items]
    elif isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return):
        parts = [statement]
    else:
        parts = []
    for part in parts:
        yield from (node for node in ast.walk(part) if isinstance(node, ast.Call))


def _method(statement: ast.stmt) -> str:
    """The method that a statement consists of; empty for another one."""
    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return _name_of(statement.value) if is_call else ""


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _move_behind(block: list[ast.stmt], index: int, other: int) -> None:
    block.insert(other, block.pop(index))


def _turn_round(call: ast.Call) -> None:
    assert isinstance(call.func, ast.Attribute)
    call.func.value, call.args = call.args[0], [call.func.value]


def _record_first(function: _Function, block: list[ast.stmt], index: int) -> None:
    """Makes the event of a ``ReadyEvent`` one that was recorded at the function's first line."""
    statement = block[index]
    assert isinstance(statement, ast.Assign)
    target = ast.unparse(statement.targets[0])
    block.insert(index + 1, ast.parse(f"if {target} is not None: {target}._event = {_EARLY}").body[0])
    function.body[:0] = ast.parse(f"import torch\n{_EARLY} = {_CURRENT}.record_event()").body
