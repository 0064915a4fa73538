"""One-line faults in C and Python source, for mutants.py. A test suite has to notice them.

A fault replaces one piece of a file's text: a comparison, a sign, a constant, a condition, a whole
statement. C is cut into tokens, Python parsed by `ast`, so that comments, strings, preprocessor
lines, docstrings and annotations stay as they are. A C fault may turn out not to compile.
"""

import ast
import re
from bisect import bisect_right
from dataclasses import dataclass

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
OPPOSITES = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
SIGNS = {"+": "-", "-": "+", "+=": "-=", "-=": "+="}
JUNCTIONS = {"&&": "||", "||": "&&"}


@dataclass(frozen=True)
class Fault:
    """text[start:end] of the file becomes `new`."""

    path: str
    start: int
    end: int
    new: str
    line: int  # the line of `start`, counted from 1
    last_line: int
    place: str  # the function around it, "" outside of functions
    before: str  # the line or lines that change, with single spaces
    after: str

    def apply(self, text):
        return text[: self.start] + self.new + text[self.end :]

    @property
    def key(self):
        """Names the fault in lists; stays the same when lines are added elsewhere."""
        return self.path, self.place, self.before, self.after


def find_faults(path, text):
    """All faults of a file, in the order of its text."""
    language = python_edits if path.endswith(".py") else c_edits
    line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
    places = python_places(text) if path.endswith(".py") else c_places(text)
    faults = []
    for start, end, new in sorted(set(language(text))):
        first, last = bisect_right(line_starts, start), bisect_right(line_starts, end - 1)
        stop = line_starts[last] - 1 if last < len(line_starts) else len(text)
        head, tail = text[line_starts[first - 1] : start], text[end:stop]
        before, after = (" ".join(f"{head}{x}{tail}".split()) for x in (text[start:end], new))
        place = max((p for p in places if p[0] <= first <= p[1]), default=(0, 0, ""))[2]
        span = {"start": start, "end": end, "line": first, "last_line": last, "place": place}
        faults.append(Fault(path, new=new, before=before, after=after, **span))
    return faults


def plus_one(literal):
    """An integer literal's successor in the same base with the same suffix, or None."""
    match = re.fullmatch(r"(0[xX])?([\dA-Fa-f]+?)([uUlL]*)", literal)
    if not match or (not match[1] and not match[2].isdecimal()):
        return None
    value = int(match[2], 16 if match[1] else 10) + 1
    return (f"0x{value:X}" if match[1] else str(value)) + match[3]


def swap_min_max(name):
    """fminf → fmaxf, max_len → min_len; None for other names."""
    swapped = re.sub(
        r"(?<![a-z])(f?)(min|max)(?=f?(?![a-z]))",
        lambda m: m[1] + {"min": "max", "max": "min"}[m[2]],
        name,
    )
    return None if swapped == name else swapped


# ---- C -----------------------------------------------------------------------------------------

C_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:\\\n|/\*.*?\*/|[^\n])*)
    |(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<operator><<=|>>=|\.\.\.|->|\+\+|--|&&|\|\||<<|>>|[<>=!+\-*/%&|^]=|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
OPENING, CLOSING = {"(", "[", "{"}, {")", "]", "}"}
ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=", "++", "--"}
NO_STATEMENT = {
    *("assert", "static_assert", "_Static_assert", "const", "static", "extern", "typedef", "enum"),
    *("struct", "union", "goto", "break", "continue", "else", "do", "case", "default", "(", "{"),
}


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    start: int
    end: int


def c_tokens(text):
    return [
        Token(match.lastgroup, match[0], match.start(), match.end())
        for match in C_TOKEN.finditer(text)
        if match.lastgroup != "skip"
    ]


def c_places(text):
    """(first line, last line, name) of every function, in the layout that clang-format gives it."""
    lines = text.split("\n")
    places = []
    for number, line in enumerate(lines, 1):
        if match := re.match(r"([a-z]\w*)\(", line):
            last = next((i for i in range(number, len(lines)) if lines[i] == "}"), number)
            places.append((number, last + 1, match[1]))
    return places


def c_edits(text):
    tokens = c_tokens(text)
    for i, token in enumerate(tokens):
        before = tokens[i - 1] if i else None
        after = tokens[i + 1].text if i + 1 < len(tokens) else ""
        is_binary = before and (before.kind != "operator" or before.text in (")", "]"))
        is_binary = is_binary and before.text not in ("return", "case")
        if token.text in COMPARISONS:
            swap = OPPOSITES if token.text in OPPOSITES and chooses_one(tokens, i) else COMPARISONS
            yield token.start, token.end, swap[token.text]
        elif token.text in SIGNS and is_binary:
            yield token.start, token.end, SIGNS[token.text]
        elif token.text in JUNCTIONS:
            yield token.start, token.end, JUNCTIONS[token.text]
        elif token.kind == "number" and (successor := plus_one(token.text)):
            yield token.start, token.end, successor
        elif token.text in ("if", "while") and after == "(":
            close = tokens[closing(tokens, i + 1)]
            condition = text[tokens[i + 1].start : close.end]
            yield tokens[i + 1].start, close.end, f"(!{condition})"
        elif token.kind == "name" and after == "(" and (swapped := swap_min_max(token.text)):
            yield token.start, token.end, swapped
    yield from removed_statements(tokens)
    yield from weaker_rules(tokens, text)


# What else an array of a rule may be: a dtype more, and the arguments that are sizes.
WIDER = {
    "SMLA_DTYPE_BF16": "SMLA_DTYPE_FP32",
    "SMLA_DTYPE_FP32": "SMLA_DTYPE_BF16",
    "SMLA_DTYPE_FLOATS": "SMLA_DTYPE_INT32",
    "SMLA_DTYPE_INT32": "SMLA_DTYPE_INT64",
    "SMLA_DTYPE_INT64": "SMLA_DTYPE_FP32",
    "SMLA_DTYPE_BOOL": "SMLA_DTYPE_INT32",
    "SMLA_DTYPE_UINT8": "SMLA_DTYPE_BF16",
    "SMLA_DTYPE_E4M3_OR_BYTES": "SMLA_DTYPE_BF16",
}
SIZES = {
    "smla_require_1d": (4,),
    "smla_require_2d": (4, 5),
    "smla_require_3d": (4, 5, 6),
    "smla_require_vector": (3,),
    "smla_require_slots": (3,),
    "smla_require_state": (3, 4),
}


def weaker_rules(tokens, text):
    """Rules of arrays (csrc/core/rule.h) that take a dtype more, any size, or an output as if it
    were only read."""
    for i, token in enumerate(tokens):
        is_asked = i and tokens[i - 1].text in ("==", "!=", "&")
        if token.text in WIDER and not is_asked:
            yield token.start, token.end, f"({token.text} | {WIDER[token.text]})"
        elif token.text == "SMLA_RULE_OUTPUT" and not is_asked:
            yield token.start, token.end, "0"
        sizes = []
        if token.text in SIZES and tokens[i + 1].text == "(":
            arguments = [*items(tokens, i + 1)]
            sizes = [arguments[k] for k in SIZES[token.text] if k < len(arguments)]
        elif [x.text for x in tokens[i : i + 4]] == [".", "shape", "=", "{"]:
            sizes = items(tokens, i + 3)
        for start, end in sizes:
            if text[start:end] != "SMLA_ANY":
                yield start, end, "SMLA_ANY"


def items(tokens, i):
    """The spans of what commas separate in the bracket that tokens[i] opens."""
    end = closing(tokens, i)
    while i < end:
        stop = scan(tokens, i + 1, {",", tokens[end].text})
        yield tokens[i + 1].start, tokens[stop - 1].end
        i = stop


def closing(tokens, i):
    """The index of the bracket that closes tokens[i]."""
    depth = 0
    for at in range(i, len(tokens)):
        depth += (tokens[at].text in OPENING) - (tokens[at].text in CLOSING)
        if depth == 0:
            return at
    return len(tokens) - 1


def scan(tokens, i, ends):
    """The index from i on of the first token among `ends` outside of brackets."""
    while i < len(tokens) and tokens[i].text not in ends:
        i = (closing(tokens, i) if tokens[i].text in OPENING else i) + 1
    return i


def chooses_one(tokens, i):
    """Whether tokens[i] is the comparison in `a < b ? a : b`, where `<=` gives the same result."""
    question = scan(tokens, i + 1, {"?", ";", ")", ",", "}"})
    if question >= len(tokens) or tokens[question].text != "?":
        return False
    colon = scan(tokens, question + 1, {":", ";"})
    end = scan(tokens, colon + 1, {";", ")", ",", "}", "]"})
    words = [token.text for token in tokens]
    right, yes, no = words[i + 1 : question], words[question + 1 : colon], words[colon + 1 : end]
    left = words[i - len(yes if yes != right else no) : i]
    return sorted([left, right]) == sorted([yes, no])


def removed_statements(tokens):
    """Removals of calls and assignments, and of returns inside a function's inner blocks."""
    depth = 0
    for i, token in enumerate(tokens):
        depth += (token.text == "{") - (token.text == "}")
        before = tokens[i - 1].text if i else ""
        starts = before in ("{", "}", ";", "else") or (before == ")" and is_header(tokens, i - 1))
        if not starts or depth == 0 or token.text in NO_STATEMENT or token.text in CLOSING:
            continue
        end = scan(tokens, i, {";", "}", "{"})
        words = [t.text for t in tokens[i:end]]
        is_return = token.text == "return" and depth > 1
        is_call = len(words) > 2 and token.kind == "name" and words[1] == "("
        is_call = is_call and words[0] not in ("if", "for", "while", "switch", "return")
        changes = ASSIGNMENTS.intersection(words) and not is_declaration(tokens[i:end])
        if end < len(tokens) and tokens[end].text == ";" and (is_return or is_call or changes):
            yield token.start, tokens[end].end, ";"


def is_header(tokens, i):
    """Whether tokens[i] closes the parentheses of an if, a for or a while."""
    depth = 0
    for at in range(i, 0, -1):
        depth += (tokens[at].text == ")") - (tokens[at].text == "(")
        if depth == 0:
            return tokens[at - 1].text in ("if", "for", "while")
    return False


def is_declaration(tokens):
    """Whether the tokens begin as `type name …` or `type *name …`."""
    rest = iter([*tokens[1:], Token("operator", ";", 0, 0)])
    following = next(token for token in rest if token.text != "*")
    return tokens[0].kind == "name" and following.kind == "name"


# ---- Python ------------------------------------------------------------------------------------

PYTHON_OPERATORS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (r"is\b", "is not"),
    ast.IsNot: (r"is\s+not\b", "is"),
    ast.In: (r"in\b", "not in"),
    ast.NotIn: (r"not\s+in\b", "in"),
    ast.And: (r"and\b", "or"),
    ast.Or: (r"or\b", "and"),
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
}


def python_places(text):
    return [
        (node.lineno, node.end_lineno, node.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]


def code_nodes(node):
    """The nodes below this one, without annotations, f-strings and type-checking imports."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if name in ("annotation", "returns") or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.AST):
                yield child
                yield from code_nodes(child)


def python_edits(text):
    lines = text.splitlines(keepends=True)
    line_starts = [0]
    for line in lines:
        line_starts.append(line_starts[-1] + len(line))

    def offset(line, column):  # ast counts columns in bytes
        return line_starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(node):
        return (
            offset(node.lineno, node.col_offset),
            offset(node.end_lineno, node.end_col_offset),
        )

    def operator(left, op, right):
        if type(op) in PYTHON_OPERATORS:
            pattern, new = PYTHON_OPERATORS[type(op)]
            start = span(left)[1]
            if match := re.search(pattern, text[start : span(right)[0]]):
                yield start + match.start(), start + match.end(), new

    for node in code_nodes(ast.parse(text)):
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
                    yield from operator(left, op, right)
            case ast.BinOp():
                yield from operator(node.left, node.op, node.right)
            case ast.BoolOp():
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield from operator(left, node.op, right)
            case ast.Constant(value=int()) if not isinstance(node.value, bool):
                start, end = span(node)
                if successor := plus_one(text[start:end]):
                    yield start, end, successor
            case ast.If() | ast.While() | ast.IfExp():
                start, end = span(node.test)
                yield start, end, f"not ({text[start:end]})"
            case ast.Call(func=ast.Name(id="min" | "max" as name)):
                yield *span(node.func), swap_min_max(name)
            case ast.Assign() | ast.AugAssign() | ast.Return() | ast.Raise() | ast.Expr():
                value = getattr(node, "value", None)
                if not (isinstance(node, ast.Expr) and isinstance(value, ast.Constant)):
                    yield *span(node), "pass"
