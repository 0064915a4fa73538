"""Makes the stubs of modules of sparse_mla/ops/ whose operators have overloads. The build writes
them beside the modules, as <module>.pyi, which type checkers read instead.

A declaration says what a call may return. Which of it a call does return follows from one argument,
so the stub has the declaration three times: for calls without, for calls with it, and for calls of
which that is unknown. An option with a second name has the declaration once for each.
"""

import ast
import copy
from pathlib import Path
from typing import NamedTuple

ROOM = Path("sparse_mla/ops")


class Choice(NamedTuple):
    decides: str  # a parameter: False or None, or something else
    without: str  # the result where it is False or None
    given: str  # the result of other calls
    needs: str = ""  # another parameter, which is None there


ONE, TWO, THREE = "Result", "tuple[Result, Result]", "tuple[Result, Result, Result]"
CHOICES = {
    "sparse_attention": Choice("return_max_logits", TWO, THREE, "max_logits"),
    "convert_req_index_to_global_index": Choice("valid_counts", ONE, TWO),
    "fused_indexer_q_rope_quant": Choice("use_fp4", TWO, THREE, "out_scale"),
    "lightning_indexer": Choice("slots_block_table", ONE, THREE),
    "top_k_per_row": Choice("slots_block_table", ONE, THREE),
    "apply_rope": Choice("k_pe", "tuple[Result, None]", TWO, "k_out"),
    "fused_inv_rope_fp8_quant": Choice("quantize", ONE, TWO, "out_scale"),
}
SECOND_NAMES = {"concat_and_cache_mla": ("kv_cache_dtype", "kv_format")}


def make_stubs() -> dict[Path, str]:
    """The stubs by their paths."""
    modules = {path: ast.parse(path.read_text()) for path in sorted(ROOM.glob("*.py"))}
    return {
        path.with_suffix(
            ".pyi"
        ): f"# buildtools/stubs.py made this of {path.name}.\n{make_stub(x)}\n"
        for path, x in modules.items()
        if names_of(x) & (CHOICES.keys() | SECOND_NAMES.keys())
    }


def names_of(module: ast.Module) -> set[str]:
    return {node.name for node in module.body if isinstance(node, ast.FunctionDef)}


def make_stub(module: ast.Module) -> str:
    body: list[ast.stmt] = [ast.parse("from typing import Literal, overload").body[0]]
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.Expr(ast.Constant(...))]
            node.decorator_list = [x for x in node.decorator_list if ast.unparse(x) != "operator"]
            body += overloads_of(node)
        elif not isinstance(node, ast.Expr) and getattr(node, "module", "") != "__future__":
            body.append(node)  # all but the docstring
    module.body = body
    return ast.unparse(module)


def overloads_of(node: ast.FunctionDef) -> list[ast.stmt]:
    if node.name in SECOND_NAMES:
        first, second = SECOND_NAMES[node.name]
        other = copy.deepcopy(node)
        find(other, first)[0].arg = second
        found = [node, other]
    elif node.name in CHOICES:
        choice = CHOICES[node.name]
        found = [narrow(node, choice, is_given) for is_given in (False, True)] + [node]
    else:
        return [node]
    for x in found:
        x.decorator_list = [ast.Name("overload")]
    return list(found)


def narrow(node: ast.FunctionDef, choice: Choice, is_given: bool) -> ast.FunctionDef:
    """The declaration for calls with the deciding argument, or without."""
    node = copy.deepcopy(node)
    parameter, default = find(node, choice.decides)
    is_flag = ast.unparse(parameter.annotation) == "bool"
    values = f"Literal[{is_given}]" if is_flag else "Array" if is_given else "None"
    parameter.annotation = expression(values)
    if default is not None and bool(default.value) != is_given:
        node.args.kw_defaults[node.args.kwonlyargs.index(parameter)] = None
    if choice.needs and not is_given:
        find(node, choice.needs)[0].annotation = expression("None")
    node.returns = expression(choice.given if is_given else choice.without)
    return node


def find(node: ast.FunctionDef, name: str) -> tuple[ast.arg, ast.Constant | None]:
    """A parameter, and its default if it is one of keywords."""
    keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    parameters = [*((x, None) for x in node.args.args), *keywords]
    return next((x, default) for x, default in parameters if x.arg == name)


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
