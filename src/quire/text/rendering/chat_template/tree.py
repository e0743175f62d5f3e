"""Puts the counters of `template_budget` into the syntax tree of a template."""

from collections.abc import Container, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

# Not identifiers of the template language, so no template can name them.
COUNTED = "counted iterable"
CHARGED = "charged operand"
MEASURED = "measured operand"
CONCATENATED = "concatenated operands"
BUILT = "built value"
PRINTED = "printed value"
LISTED = "listed value"
# These take or leave what they are given item by item, and look into none.
_SHALLOW_FILTERS = frozenset(
    {"attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list",
     "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"}
)  # fmt: skip
# These do work of Python for every item.
_FILTERS_PER_ITEM = frozenset(
    {"batch", "groupby", "map", "max", "min", "reject", "rejectattr", "select",
     "selectattr", "slice", "sort", "sum", "unique"}
)  # fmt: skip
# These give what was there before.
_PASSING_FILTERS = frozenset({"attr", "d", "default", "first", "last", "random"})


# These apply a filter or a test that an argument of theirs names.
_NAMED_BY_ARGUMENT = {
    "map": ("filter", 0),
    "select": ("test", 0),
    "reject": ("test", 0),
    "selectattr": ("test", 1),
    "rejectattr": ("test", 1),
}
_IMPLICIT_NAMES = frozenset({"caller", "kwargs", "loop", "self", "super", "varargs"})


def unknown_names(
    tree: nodes.Template, filters: Container[str], tests: Container[str], functions: Container[str]
) -> list[str]:
    """Return the unknown names that a template uses: filters, tests, functions, other templates.

    Jinja finds a filter or a test in a branch only when it gets there.
    """
    kinds = {"filter": filters, "test": tests, "function": functions}
    found: list[str] = []
    for kind, name in _used_names(tree):
        if name not in kinds[kind]:
            found.append(f"the unknown {kind} {name!r}")
    if next(tree.find_all((nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include)), None):
        found.append("another template, and there is none")
    return list(dict.fromkeys(found))


def _used_names(tree: nodes.Template) -> Iterator[tuple[str, str]]:
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    own |= _IMPLICIT_NAMES | {macro.name for macro in tree.find_all(nodes.Macro)}
    for node in tree.find_all(nodes.Filter):
        yield "filter", node.name
        place = _NAMED_BY_ARGUMENT.get(node.name)
        if place is not None and len(node.args) > place[1]:
            argument = node.args[place[1]]
            if isinstance(argument, nodes.Const) and isinstance(argument.value, str):
                yield place[0], argument.value
    for node in tree.find_all(nodes.Test):
        yield "test", node.name
    for node in tree.find_all(nodes.Call):
        if isinstance(node.node, nodes.Name) and node.node.name not in own:
            yield "function", node.node.name


class LimitInserter(NodeTransformer):
    """Puts the counters into the syntax tree. They count loops, built values (by `~`, filters,
    slices, or in place), and values that are gone through as a whole (by filters, comparisons,
    slices). Printed values get their texts here too."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node, node.iter, COUNTED)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [
            part if _is_text(part) else _filtered(node, part, PRINTED) for part in node.nodes
        ]
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        if node.node is not None:
            is_shallow = node.name in _SHALLOW_FILTERS
            node.node = _filtered(node, node.node, CHARGED if is_shallow else MEASURED)
        if node.node is not None and node.name in _FILTERS_PER_ITEM:
            node.node = _filtered(node, node.node, COUNTED)
        node.args = [_measured_expression(node, argument) for argument in node.args]
        for argument in node.kwargs:
            argument.value = _measured_expression(node, argument.value)
        return node if node.name in _PASSING_FILTERS else _filtered(node, node, BUILT)

    def visit_List(self, node: nodes.List) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, node, BUILT)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, node, BUILT)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        # The others are what is assigned to.
        return _filtered(node, node, BUILT) if node.ctx == "load" else node

    def visit_Operand(self, node: nodes.Operand) -> nodes.Operand:  # noqa: N802
        self.generic_visit(node)
        node.expr = _measured_expression(node, node.expr)
        if node.op in ("in", "notin"):
            node.expr = _filtered(node, node.expr, LISTED)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = _measured_expression(node, node.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Test:  # noqa: N802
        self.generic_visit(node)
        if node.args:  # it compares
            node.node = _measured_expression(node, node.node)
        node.args = [_measured_expression(node, argument) for argument in node.args]
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        self.generic_visit(node)
        node.key = _measured_expression(node, node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node, node.node, CHARGED)
            return _filtered(node, node, BUILT)
        node.arg = _measured_expression(node, node.arg)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, nodes.List(node.nodes, lineno=node.lineno), CONCATENATED)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:  # noqa: N802
        self.generic_visit(node)
        node.filter = _filtered(node, node.filter, BUILT)
        return node


def _filtered(place: nodes.Node, value: nodes.Node | None, name: str) -> nodes.Filter:
    """`value | name` at the line of `place`."""
    wrapped = nodes.Filter(value, name, [], [], None, None, lineno=place.lineno)
    wrapped.environment = place.environment
    return wrapped


def _is_text(value: nodes.Node) -> bool:
    return isinstance(value, nodes.TemplateData) or (
        isinstance(value, nodes.Const) and isinstance(value.value, str)
    )


def _measured_expression(place: nodes.Node, value: Any) -> Any:
    """`value`, measured unless it stands in the template as it is."""
    if isinstance(value, nodes.TemplateData) or (
        isinstance(value, nodes.Const) and not isinstance(value.value, int)
    ):
        return value
    return _filtered(place, value, MEASURED)
