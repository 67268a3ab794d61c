"""Calls of exported functions by name, at the cost of positional ones.

Exported functions take positional arguments, in an order that only `cute_kernels.signatures` knows. Calling them by
keyword would cost 0.7 us for 20 arguments, a quarter of the whole host path. `by_name` recompiles a method once, when
it is defined: each keyword call becomes a positional one in the signature's order.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar, cast

from cute_kernels.signatures import Signature

_Method = TypeVar("_Method", bound=Callable[..., Any])


class _Calls(ast.NodeTransformer):
    """Puts the keywords of calls of a name or attribute in its signature's order."""

    def __init__(self, signatures: dict[str, Signature]) -> None:
        self.signatures = signatures
        self.found: set[str] = set()

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name not in self.signatures:
            return node
        if node.args:
            raise TypeError(f"{name} is called by position; give its arguments names")
        self.found.add(name)
        values = {str(keyword.arg): keyword.value for keyword in node.keywords}
        ordered = self.signatures[name].ordered(values, lambda zero: ast.Constant(zero))
        return ast.copy_location(ast.Call(node.func, list(ordered), []), node)


def by_name(**signatures: Signature) -> Callable[[_Method], _Method]:
    """Decorator for methods that call exported functions by keyword, as self.function(x=x, ...) or function(x=x, ...).

    Each keyword here names such a function and gives its signature. Optional arguments that a call leaves out are 0.

    Raises:
        TypeError: a call lacks an argument, has an unknown one, or one without a name; or a function is never called;
            or the method has a closure.
        OSError: there is no source to read.
    """

    def compiled(method: _Method) -> _Method:
        if method.__code__.co_freevars:
            raise TypeError(f"{method.__qualname__} has a closure, which compiling anew would lose (super() is one)")
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list = []
        calls = _Calls(signatures)
        calls.visit(tree)
        if never := signatures.keys() - calls.found:
            raise TypeError(f"{method.__qualname__} never calls {min(never)}")
        ast.fix_missing_locations(tree)
        ast.increment_lineno(tree, method.__code__.co_firstlineno - 1)
        flags = __future__.annotations.compiler_flag
        code = compile(tree, method.__code__.co_filename, "exec", flags, dont_inherit=True)
        namespace: dict[str, Any] = {}
        exec(code, method.__globals__, namespace)
        made = functools.update_wrapper(namespace[method.__name__], method)
        del made.__wrapped__
        return cast(_Method, made)

    return compiled
