"""An operator is called, inspected and passed around as the function that declares it."""

import copy
import gc
import inspect
import pickle
import pydoc
import sys
import typing
import weakref

import ml_dtypes
import numpy as np
import operators
import pytest
from example_table import TABLE, UNREAD

import sparse_mla
from sparse_mla import _C, _results, ops
from sparse_mla.integrations import _schema

pytestmark = pytest.mark.frameworks

OPERATORS = [value for value in vars(sparse_mla).values() if isinstance(value, _C.Operator)]
ATTENTION = sparse_mla.sparse_attention


def arguments() -> tuple[list, dict]:
    q, kv = (np.ones(shape, ml_dtypes.bfloat16) for shape in ((1, 2, 576), (9, 576)))
    return [q, kv, np.array([[0, 3, -1]], np.int32)], {"softmax_scale": 1 / 576}


def words_of(call) -> str:
    with pytest.raises(TypeError) as error:
        call()
    return str(error.value)


def test_all_are_there():
    assert {op.__name__ for op in OPERATORS} == set(operators.FACTS)


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_looks_as_its_declaration(op):
    declared = op.__wrapped__
    assert inspect.isroutine(op)
    assert inspect.signature(op) == inspect.signature(declared)
    assert inspect.getdoc(op) == inspect.getdoc(declared)
    assert op.__annotations__ == declared.__annotations__
    assert op.__module__.startswith("sparse_mla.ops.")
    assert getattr(sys.modules[op.__module__], op.__name__) is op
    assert repr(op) == f"<operator sparse_mla.{op.__name__}>"
    assert "Parameters\n" in pydoc.render_doc(op, renderer=pydoc.plaintext)


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_results_are_declared_to_be_like_the_first_array(op):
    first, *others = (str(p.annotation) for p in inspect.signature(op).parameters.values())
    assert "Like[" in first or not any("Like[" in annotation for annotation in others)


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_copies_and_pickles_are_itself(op):
    assert pickle.loads(pickle.dumps(op)) is op
    assert copy.copy(op) is op
    assert copy.deepcopy(op) is op


def fits(op, args) -> bool:
    try:
        inspect.signature(op).bind(*args)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((None,) * 5, {}),
        ((None,) * 60, {}),
        ((None,) * 4, {"stream": 0, "color": 1}),
        ((None,) * 3, {"topk": 1, "q": 2, "x": 3, "kv_cache": 4, "out_a": 5, "q_nope": 6}),
        ((), {f"keyword_{i}": i for i in range(60)}),
    ],
    ids=["nothing", "five", "many", "unknown", "twice", "many unknown"],
)
def test_refuses_as_its_declaration(op, args, kwargs):
    if args and not kwargs and fits(op, args):
        args = args[:-1]
    words = words_of(lambda: op.__wrapped__(*args, **kwargs))
    assert words.startswith(f"{op.__name__}()")
    assert words_of(lambda: op(*args, **kwargs)) == words
    assert words_of(lambda: op.__call__(*args, **kwargs)) == words


def test_every_form_of_a_call():
    args, kwargs = arguments()
    names = ["q", "kv_cache", "indices"]
    out, lse = ATTENTION(*args, **kwargs)
    spelled = {"".join(list(name)): value for name, value in zip(names, args, strict=True)}
    results = [
        ATTENTION(**spelled, **kwargs),  # names that are not interned
        ATTENTION(args[0], indices=args[2], kv_cache=args[1], **kwargs),
        ATTENTION.__call__(*args, **kwargs),
        ATTENTION.__call__(args[0], **dict(zip(names[1:], args[1:], strict=True)), **kwargs),
    ]
    for other_out, other_lse in results:
        np.testing.assert_array_equal(other_out, out)
        np.testing.assert_array_equal(other_lse, lse)


def test_as_an_attribute_of_a_class():
    class Layer:
        attend = ATTENTION

    assert Layer().attend is ATTENTION
    assert Layer.attend is ATTENTION


def test_has_attributes_as_a_function_has():
    ATTENTION.note = "mine"
    assert vars(ATTENTION)["note"] == "mine"
    del ATTENTION.note
    with pytest.raises(AttributeError):
        _ = ATTENTION.note
    assert weakref.ref(ATTENTION)() is ATTENTION


def test_operators_go_when_nobody_has_them():
    def k_up_proj(q_nope, W_UK, *, out=None, stream=None):
        """Not the one that users call."""

    op = _C.Operator(k_up_proj, "k_up_proj")
    op.itself = op
    gone = weakref.ref(op)
    del op
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("declaration", "name", "error", "words"),
    [
        (lambda: None, "attend", ValueError, 'must be an operator of C, got "attend"'),
        (lambda x: None, "k_up_proj", ValueError, "must have the 4 parameters of k_up_proj, got 1"),
        (lambda a, b, c, d: None, "k_up_proj", ValueError, "parameters of k_up_proj, got 'a'"),
        (len, "k_up_proj", AttributeError, "__code__"),
    ],
)
def test_declarations_that_do_not_fit(declaration, name, error, words):
    with pytest.raises(error, match=words):
        _C.Operator(declaration, name)


def test_defaults_that_cannot_be_read():
    """A parameter without a default is a KeyError of the look-up. Any other error is the caller's
    to see."""

    class Broken(dict):
        def __getitem__(self, name):
            raise OSError(name)

    def k_up_proj(q_nope, W_UK, *, out=None, stream=None):
        """Not the one that users call."""

    k_up_proj.__kwdefaults__ = Broken(out=None, stream=None)
    with pytest.raises(OSError, match=r"^out$"):
        _C.Operator(k_up_proj, "k_up_proj")


def test_declarations_are_let_go():
    """An operator keeps no references to what it has read of a declaration, whether that fits or
    not, nor to the arguments of a refused call."""

    def k_up_proj(q_nope, W_UK, *, out=None, stream=None):
        """Not the one that users call."""

    defaults = k_up_proj.__kwdefaults__
    held = sys.getrefcount(defaults)
    op = _C.Operator(k_up_proj, "k_up_proj")
    with pytest.raises(ValueError, match="must have the"):
        _C.Operator(k_up_proj, "sparse_attention")
    assert sys.getrefcount(defaults) == held
    given = object()
    held = sys.getrefcount(given)
    for _ in range(3):
        with pytest.raises(TypeError):
            op(given, given, given)
        with pytest.raises(TypeError):
            op(given, given, unknown=given)
    assert sys.getrefcount(given) == held


def test_more_parameters_than_any_operator_has():
    names = ", ".join(f"p{i}" for i in range(60))
    with pytest.raises(ValueError, match="must have the 4 parameters of k_up_proj, got 60"):
        _C.Operator(eval(f"lambda {names}: None"), "k_up_proj")


def test_positional_defaults_of_none_are_not_taken():
    """A parameter that is declared without a default is required, even where the operator's table
    makes it optional."""

    def k_up_proj(q_nope, W_UK, out, stream):
        """All four are required here."""

    op = _C.Operator(k_up_proj, "k_up_proj")
    assert "missing 2 required positional arguments: 'out' and 'stream'" in words_of(
        lambda: op(None, None)
    )
    q, w = np.ones((1, 2, 4), ml_dtypes.bfloat16), np.ones((512, 2, 4), ml_dtypes.bfloat16)
    np.testing.assert_array_equal(op(q, w, None, None), ops.k_up_proj(q, w))


def test_a_declaration_that_takes_more_than_c():
    """C does not use defaults of positional parameters, so it refuses a call that the declaration
    takes. Such a declaration is a mistake in the package."""
    answer = object()

    def dynamic_per_tensor_quant(x=None, *, out=None, stream=None):
        return answer

    op = _C.Operator(dynamic_per_tensor_quant, "dynamic_per_tensor_quant")
    held = sys.getrefcount(answer)
    for _ in range(3):
        with pytest.raises(SystemError, match=r"^dynamic_per_tensor_quant: the declaration takes"):
            op()
    assert sys.getrefcount(answer) == held
    assert op(np.ones(3, np.float32))[0].shape == (3,)


@pytest.mark.parametrize("op", OPERATORS)
def test_annotations_have_a_meaning(op):
    assert typing.get_type_hints(op.__wrapped__)


NO_ARGUMENT = {"second", "result", "asked result", "stream of the arrays"}
WRITTEN = {"output", "output or none", "output or first", "asked output", "result"}
WRITTEN |= {"asked result"}
NONE = {"output", "output or none", "output or first", "asked output", "kv_format", "size"}
NONE |= {"stream", "scale or none", "asking input", "three ints or none", "count or none", "hint"}


@pytest.mark.parametrize("op", OPERATORS)
def test_the_table_and_the_declaration_are_one(op):
    """Both have the same names, and what the table makes optional has a default in the
    declaration, unless it is an input between required arguments, which may be None, or `cp` of the
    operators that are for ranks alone."""
    parameters = inspect.signature(op).parameters
    table = dict(op.table)
    assert len(table) == len(op.table)
    assert {name for name, kind in op.table if kind not in NO_ARGUMENT} == set(parameters)
    needed = ("input", "input or none", "pair", "input and output")
    required = {n for n, kind in op.table if kind in needed}
    assert required <= {n for n, p in parameters.items() if p.default is p.empty}
    none = {name for name, p in parameters.items() if p.default is None}
    none |= {n for n in ("cp",) if n in table and parameters[n].default is inspect.Parameter.empty}
    positional = {name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY}
    assert not positional & none
    assert none == {
        name
        for name, kind in op.table
        if kind in NONE or (kind in ("optional input", "workspace") and name not in positional)
    }
    scales = {name for name, kind in op.table if kind == "scale"}
    given = {n: p.default for n, p in parameters.items() if n.endswith("_scale")}
    assert {n for n, default in given.items() if default == 1.0} <= scales
    assert all(given[name] in (1.0, inspect.Parameter.empty) for name in scales)
    kinds = [kind for _, kind in op.table]
    asks = "ask" in kinds or "asking input" in kinds
    assert asks == any(kind.startswith("asked") for kind in kinds)


@pytest.mark.parametrize("op", ops.OPERATORS.values())
def test_results_are_known_before_the_call(op):
    """_results.py tells the shapes and dtypes that a call returns."""
    call = operators.FRAMEWORK_CALLS[op.__name__]()
    table = dict(op.table)
    values = {n: x for n, x in (call.args | call.kwargs).items() if table[n] not in WRITTEN}
    values |= {name: True for name, kind in op.table if kind == "ask"}
    defaults = {n: p.default for n, p in inspect.signature(op).parameters.items()}
    known = tuple(_results.Rules(op).results(defaults | values).values())
    got = op(**values)
    arrays = list(got) if isinstance(got, tuple) else [got]
    for name in reversed([n for n, kind in op.table if kind == "input and output"]):
        assert arrays.pop() is values[name]
    assert (op.results == ()) == (not arrays)
    assert [(x.shape, str(x.dtype)) for x in arrays] == [result[:2] for result in known]
    for x, (*_, strides) in zip(arrays, (result for result in known), strict=True):
        if not isinstance(strides, str):
            assert x.strides == tuple(n * x.itemsize for n in strides)
    assert len(known) == sum(kind in WRITTEN for _, kind in op.table)


FOLLOWED = [
    (op, row[2][1]) for op in ops.OPERATORS.values() for row in op.results if row[2][0] == "array"
]


@pytest.mark.parametrize(("op", "name"), FOLLOWED)
def test_a_wrong_dtype_is_refused_before_a_result_has_it(op, name):
    """NumPy would have its own words for a result of 128 bits per number."""
    call = operators.FRAMEWORK_CALLS[op.__name__]()
    table = dict(op.table)
    values = {n: x for n, x in (call.args | call.kwargs).items() if table[n] not in WRITTEN}
    values[name] = np.zeros(np.shape(values[name]), np.longdouble)
    with pytest.raises(TypeError, match=rf"`{name}(\[0\])?` must be .*, got float128"):
        op(**values)


def joined(op, arguments: dict) -> dict:
    """The arguments with pairs in one, and without arrays for results."""
    table = dict(op.table)
    values = {n: x for n, x in arguments.items() if table.get(n) not in WRITTEN}
    for name in ("q", "k", "k_cache"):
        if f"{name}[0]" in values:
            values[name] = (values.pop(f"{name}[0]"), values.pop(f"{name}[1]"))
    return values


def known_results(op, values: dict) -> tuple:
    schema = _schema.Schema(op)
    defaults = {n: p.default for n, p in schema.parameters.items()}
    return tuple(schema.results(schema.part(defaults | values)).values())


EXAMPLES = [title for title, example in TABLE.items() if example.op in ops.OPERATORS]


@pytest.mark.parametrize("title", EXAMPLES)
def test_results_of_every_form_are_known(title):
    """Layouts, formats, pairs and options of each operator's calls: the results that a call makes
    are those that the rule names."""
    op, example = ops.OPERATORS[TABLE[title].op], TABLE[title]
    kinds = dict(op.table)
    arrays = {name: x.copy() for name, x in example.arrays.items()}
    values = joined(op, arrays | example.options)
    asks = {name: True for name, kind in op.table if kind == "ask"}
    known = known_results(op, values | asks)
    got = op(**values | asks)
    results = list(got) if isinstance(got, tuple) else [got]
    for _ in (n for n, kind in op.table if kind == "input and output"):
        results.pop()
    names = [n for n, kind in op.table if kind in WRITTEN]
    for name, x, (shape, dtype, *strides) in zip(names, results, known, strict=False):
        if kinds[name] == "output or first" and x is values[op.table[0][0]]:
            assert (x.shape, str(x.dtype)) == (shape, dtype)
            continue
        assert (x.shape, str(x.dtype)) == (shape, dtype), name
        assert not strides or x.strides == tuple(n * x.itemsize for n in strides[0])


def words_until_rule(error: BaseException) -> str:
    """The operator, and the argument that the error is about."""
    return str(error).partition(" must ")[0].replace("[0]", "")


def refusal(call, *args) -> str | None:
    """The beginning of the text of an error, None if there is none."""
    try:
        call(*args)
    except (TypeError, ValueError) as error:
        return words_until_rule(error)
    return None


# Where a name of an option is an array's, and an option of no result.
NOT_RULED = {("quantize_and_insert_k_cache", "k"), ("indexer_k_quant_and_cache", "k")}
NOT_RULED |= {("lightning_indexer", "dtype"), ("varlen_attention", "k")}
NOT_RULED |= {("reshape_and_cache", "k")}
RULED_OPTIONS = ("dtype", "k", "align", "groups", "scale_layout")
WRONG_OPTIONS = {
    "dtype": ("int8", "", "float16"),
    "k": (0, -1),
    "align": (0, -4),
    "groups": (0, -1, 3, 129),
    "scale_layout": ("ue8m0", ""),
    "block_size": (None,),
    "block_table": (None,),
}


@pytest.mark.parametrize("title", EXAMPLES)
def test_what_rules_refuse_the_call_refuses(title):
    """Arrays with a dimension more or less, other last dimensions, and options out of range. Both
    name the same argument."""
    op, example = ops.OPERATORS[TABLE[title].op], TABLE[title]
    good = joined(op, {name: x.copy() for name, x in example.arrays.items()} | example.options)
    bends = [lambda x: x[None], lambda x: x[0], lambda x: x[..., :-1], lambda x: x[None, None]]
    bad = [(n, bend(x)) for n, x in good.items() if isinstance(x, np.ndarray) and x.ndim > 0
           for bend in bends]  # fmt: skip
    known = inspect.signature(op).parameters
    bad += [(n, x) for n, wrong in WRONG_OPTIONS.items() if n in known for x in wrong]
    for name, value in bad:
        by_rule = refusal(known_results, op, good | {name: value})
        by_call = refusal(lambda name=name, value=value: op(**good | {name: value}))
        if by_rule is not None:
            assert by_rule == by_call, name
        elif name in RULED_OPTIONS and (op.__name__, name) not in NOT_RULED:
            assert by_call != f"{op.__name__}: `{name}`", value


@pytest.mark.parametrize(("topk", "columns"), [(2, 9), (9, 2), (4, 4), (0, 1)])
def test_mixed_lists_are_as_wide_as_their_widest_part(topk, columns):
    call = operators.GOOD_CALLS["build_mixed_sparse_indices"]()
    given = call.args | {"topk": topk, "decode_indices_are_local": False}
    given["decode_compressed_indices"] = np.zeros((2, columns), np.int32)
    given["prefill_topk_indices"] = np.zeros((2, max(topk, 1)), np.int32)
    out, lens = ops.build_mixed_sparse_indices(**given)
    width = 3 + (max(topk, columns) + 3) // 4 * 4
    known = known_results(ops.build_mixed_sparse_indices, given)
    assert [x[0] for x in known] == [out.shape, lens.shape] == [(4, width), (4,)]


def test_a_format_s_pages_without_their_size_are_refused_by_rules():
    pages = np.zeros((3, 600), np.uint8)
    keys = {"q": np.zeros((1, 2, 128), np.uint8), "weights": np.zeros((1, 2), np.float32)}
    keys |= {"k_cache": pages, "context_lens": np.zeros(1, np.int32)}
    keys |= {"block_table": np.zeros((1, 1), np.int32), "kv_format": "fp8_index"}
    keys |= {"req_id_per_token": np.zeros(1, np.int32)}
    split = {"kv_cache": pages, "kv_format": "fp8_v4"}
    for op, values in ((ops.indexer_logits, keys), (ops.dequantize_kv_cache, split)):
        with pytest.raises(ValueError, match="must come with block_size=") as caught:
            known_results(op, values)
        with pytest.raises(ValueError, match="must come with block_size=") as direct:
            op(**values)
        assert words_until_rule(direct.value) == words_until_rule(caught.value)
    for text, size in (("fp8_v4", 1), ("fp8_v41_split", 1), ("fp4_v41_split", 2)):
        cache = np.zeros((3, {1: 592, 2: 1152}[size]), np.uint8)
        given = {"kv_cache": cache, "kv_format": text, "block_size": size}
        assert known_results(ops.dequantize_kv_cache, given)[0][0] == (3, size, 512)


def test_pages_are_not_as_long_as_the_call_says():
    """The result of such pages would fill any memory. The pages are refused before it is made."""
    pages = np.zeros((3, 600), np.uint8)
    text = "`kv_cache` must have at least .* bytes per page of 2147483647 tokens"
    with pytest.raises(ValueError, match=f"^dequantize_kv_cache: {text}"):
        ops.dequantize_kv_cache(pages, kv_format="fp8_v4", block_size=2**31 - 1)


# --- nothing is None but None --------------------------------------------------------------------

FALSE = (0, 0.0, False, "", (), [], b"", np.int64(0), np.zeros(0, np.int32), np.zeros(0, np.int8))
# What a call may have instead of None: a stream of 0, and names that are arrays elsewhere.
MAY_BE_NONE = {*NONE, "optional input", "workspace", "input or none", "scale"}
MAY_BE_NONE -= {"stream", "count or none", "hint"}  # 0 is a count


@pytest.mark.parametrize("op", ops.OPERATORS.values(), ids=ops.OPERATORS)
def test_what_is_false_is_not_taken_for_none(op):
    call = operators.FRAMEWORK_CALLS[op.__name__]()
    given = call.args | call.kwargs
    for name, kind in op.table:
        if kind not in MAY_BE_NONE or name not in inspect.signature(op).parameters:
            continue
        for value in FALSE:
            if (op.__name__, name) in UNREAD and isinstance(value, np.ndarray):
                continue
            with pytest.raises((TypeError, ValueError, BufferError)) as error:
                op(**given | {name: value})
            assert str(error.value).startswith(f"{op.__name__}: "), (name, value)
            assert "got none" not in str(error.value).lower() or name in ("kv", "score"), value


# --- arguments -----------------------------------------------------------------------------------


def takes(op) -> dict:
    return dict.fromkeys(inspect.signature(op).parameters)


def by_name_and_place(op) -> list[tuple[tuple, dict]]:
    """Calls in which exactly one argument comes twice, is missing or is too much."""
    parameters = inspect.signature(op).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [p.name for p in parameters if p.default is p.empty]
    count = len(positional)
    rest = {name: None for name in required if name not in positional}
    bad: list[tuple[tuple, dict]] = [((None,) * (count + 1), rest)]
    for i, name in enumerate(positional):
        bad.append(((None,) * count, rest | {name: None}))
        later = dict.fromkeys(positional[i:])
        bad.append(((None,) * (i + 1), rest | later))
    bad += [((), {n: None for n in required if n != name}) for name in required]
    bad += [((None,) * count, {n: None for n in rest if n != name}) for name in rest]
    bad += [((None,) * count, rest | {word: None}) for word in ("", "Q", "out ", "device_", "self")]
    if takes(op).keys() & {"kv_format", "kv_cache_dtype"}:
        bad.append(((None,) * count, rest | {"kv_format": None, "kv_cache_dtype": None}))
    return bad


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_every_argument_twice_missing_or_too_much(op):
    for args, kwargs in by_name_and_place(op):
        words = words_of(lambda args=args, kwargs=kwargs: op.__wrapped__(*args, **kwargs))
        assert words_of(lambda args=args, kwargs=kwargs: op(*args, **kwargs)) == words


@pytest.mark.parametrize("op", ops.OPERATORS.values(), ids=ops.OPERATORS)
def test_functions_of_frameworks_refuse_the_same(op):
    """Those of integrations/_schema.py have the signature, and Python words what breaks it."""
    seen: list[dict] = []
    schema = _schema.Schema(op)
    function = schema.expose(seen.append, (), "sparse_mla.integrations.torch")
    assert inspect.signature(function) == inspect.signature(op)
    for args, kwargs in by_name_and_place(op):
        words = words_of(lambda args=args, kwargs=kwargs: schema.signature.bind(*args, **kwargs))
        assert words_of(lambda args=args, kwargs=kwargs: function(*args, **kwargs)) == words
    assert seen == []


@pytest.mark.parametrize("op", ops.OPERATORS.values(), ids=ops.OPERATORS)
def test_functions_of_frameworks_pass_on_what_they_get(op):
    """By position, by name and by both, and defaults for the rest. What the caller gave is not
    changed."""
    seen: list[dict] = []
    schema = _schema.Schema(op)
    function = schema.expose(seen.append, ("stream",), "sparse_mla.integrations.jax")
    names = [n for n in schema.parameters if schema.rows[n] != "stream"]
    given = {name: f"the {name}" for name in names}
    positional = [n for n in schema.positional if n in given]
    for count in range(len(positional) + 1):
        args = [given[name] for name in positional[:count]]
        kwargs = {name: given[name] for name in names if name not in positional[:count]}
        function(*args, **kwargs)
        assert seen.pop() == given
    required = {name: given[name] for name in names if name not in schema.defaults}
    left = dict(required)
    function(**left)
    assert left == required
    defaults = {name: schema.defaults[name] for name in names if name in schema.defaults}
    assert seen.pop() == defaults | required
    words = words_of(lambda: function(**required, stream=None))
    assert words == "got an unexpected keyword argument 'stream'"
    for own, other in (("kv_format", "kv_cache_dtype"), ("kv_cache_dtype", "kv_format")):
        if own in given:
            function(**required, **{other: "auto"})
            assert seen.pop() == defaults | required | {own: "auto"}
