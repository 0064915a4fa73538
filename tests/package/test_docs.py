"""Every public name explains itself: sections, shapes, dtypes, errors, and an example that runs.

A new module with public names joins MODULES; what is in its `__all__` is then held to these rules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import fnmatch
import importlib.util
import inspect
import pydoc
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import device
import numpy as np
import pytest
from helpers import find_framework, run_examples, run_python, with_marks

import sparse_mla

# A module that needs a framework is tested where that is installed; conftest.py can require it.
FRAMEWORKS = ("torch", "jax", "transformers")
MODULES = ["sparse_mla", "sparse_mla.dense", "sparse_mla.v4"]
MODULES += ["sparse_mla.flash_attn", "sparse_mla.flash_mla"]
MODULES += [
    f"sparse_mla.integrations.{name}" for name in FRAMEWORKS if importlib.util.find_spec(name)
]

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # PyTorch
]

# ARRAY finds annotations of a framework's arrays; other parameters are ints, names, layers. "cache"
# in a description stands for the shapes that help(sparse_mla.ops) lists.
ARRAY = re.compile(r"\b(?:Array|Tensor)\b")
SHAPE = re.compile(r"\[[^\]]|\bcache\b|shape of")
DTYPE = re.compile(r"bf16|fp16|fp32|e4m3|int32|int64|uint8|dtype of|integers|row = |of any format")


class Public(typing.NamedTuple):
    name: str
    obj: typing.Any
    owner: type | None = None

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.obj) or ""

    def parameters(self) -> list[inspect.Parameter]:
        if inspect.isclass(self.obj) and self.obj.__init__ is object.__init__:
            return []
        parameters = inspect.signature(self.obj).parameters.values()
        return [p for p in parameters if p.name not in ("self", "cls") and p.name[0] != "_"]

    def section(self, title: str) -> str:
        """The lines below a title and its rule, up to the next section."""
        found = re.search(rf"^{title}\n-+\n(.*?)(?=^Source:|^\w+\n-+\n|\Z)", self.doc, re.M | re.S)
        return found[1] if found else ""

    def entries(self) -> dict[str, str]:
        """The entries of Parameters and Attributes: name -> its line and description."""
        text = self.section("Parameters") + self.section("Attributes")
        entries = {}
        for names, rest in re.findall(r"^(\w[\w, ]*) : (.*(?:\n +.*)*)", text, re.M):
            entries |= dict.fromkeys(names.split(", "), rest)
        return entries


def members_of(cls: type) -> dict[str, typing.Any]:
    """What the class has of its own, and what it inherits from classes of this package."""
    ours = [x for x in reversed(cls.__mro__) if x is cls or x.__module__.startswith("sparse_mla")]
    return {key: value for x in ours for key, value in vars(x).items()}


def public_members(owner: type, name: str) -> Iterator[Public]:
    for key, value in members_of(owner).items():
        is_shown = inspect.isroutine(value) or inspect.isdatadescriptor(value)
        if is_shown and not key.startswith("_"):
            yield Public(f"{name}.{key}", getattr(value, "__func__", value), owner)


def public_names() -> Iterator[Public]:
    for module_name in MODULES:
        module = device.import_quietly(module_name)
        yield Public(module_name, module)
        for name in module.__all__:
            obj, full_name = getattr(module, name), f"{module_name}.{name}"
            if inspect.isclass(obj):
                yield Public(full_name, obj)
                yield from public_members(obj, full_name)
            elif callable(obj):
                yield Public(full_name, obj)
            else:
                assert isinstance(obj, (str, ModuleType)), f"{full_name}: {type(obj)}"


PUBLIC = list(public_names())
CALLABLE = [p for p in PUBLIC if callable(p.obj)]
PROPERTIES = [p for p in PUBLIC if p.owner and not callable(p.obj)]
EXAMPLES = [p for p in PUBLIC if p not in PROPERTIES]


def each(publics: list[Public]):
    return pytest.mark.parametrize("public", publics, ids=lambda public: public.name)


def test_public_names_are_found():
    names = {public.name for public in PUBLIC}
    assert {"sparse_mla", "sparse_mla.Tensor", "sparse_mla.MetadataBuilder.build"} <= names
    assert "sparse_mla.Tensor.shape" in {public.name for public in PROPERTIES}
    assert len(names) == len(PUBLIC)


@each(PUBLIC)
def test_begins_with_a_sentence_and_shows_in_help(public):
    first = public.doc.split("\n\n")[0]
    assert re.match(r"[\w\"`(].*[.:]$", first, re.S), first
    assert first.splitlines()[0] in pydoc.plain(pydoc.render_doc(public.obj))


@each(EXAMPLES)
def test_has_an_example_and_it_runs(public):
    """The example runs with nothing imported, as a reader would paste it. Those of a framework's
    section are the examples of the framework's module."""
    doc = public.doc.partition("\nPyTorch\n-------\n")[0]
    example = doctest.DocTestParser().get_doctest(doc, {}, public.name, None, None)
    assert example.examples, f"{public.name} has no example"
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False)
    with on_the_cpu(public.name):
        runner.run(example, out=report.append, clear_globs=False)
    assert runner.failures == 0, "".join(report)


def on_the_cpu(name: str):
    """Makes JAX create arrays on the CPU, where our operators run in `jit`, and not on a GPU."""
    if not name.startswith("sparse_mla.integrations.jax"):
        return contextlib.nullcontext()
    jax = device.import_quietly("jax")
    return jax.default_device(jax.devices("cpu")[0])


@each(PROPERTIES)
def test_a_property_is_shown_in_its_class_s_example(public):
    key = public.name.rsplit(".", 1)[1]
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(public.owner))
    assert any(f".{key}" in example.source for example in examples)


@each(CALLABLE)
def test_parameters_are_those_of_the_signature(public):
    """A class documents the parameters of its constructor, if it has one, and attributes."""
    parameters = {p.name for p in public.parameters()}
    documented = set(public.entries())
    if inspect.isclass(public.obj):
        assert parameters <= documented
        assert documented - parameters <= set(attributes_of(public.obj))
    else:
        assert documented == parameters


def attributes_of(cls: type) -> list[str]:
    fields = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    return [*fields, *members_of(cls), *getattr(cls, "__annotations__", ())]


@each(CALLABLE)
def test_arrays_have_shapes_and_dtypes_and_their_functions_a_source(public):
    entries = public.entries()
    arrays = [p for p in public.parameters() if ARRAY.search(str(p.annotation))]
    for parameter in arrays:
        text = entries[parameter.name]
        assert SHAPE.search(text), f"{parameter.name}: no shape in {text!r}"
        assert DTYPE.search(text), f"{parameter.name}: no dtype in {text!r}"
    if arrays:
        assert re.search(r"^Source: ", public.doc, re.M)


@each(CALLABLE)
def test_results_and_errors_are_told(public):
    if inspect.isclass(public.obj):
        return
    assert public.section("Returns"), "Returns"
    if any(p.kind < p.VAR_POSITIONAL or p.kind == p.KEYWORD_ONLY for p in public.parameters()):
        assert re.search(r"^\w*Error", public.section("Raises")), "Raises"


@pytest.mark.parametrize("name", with_marks("torch", "jax"))
def test_modules_load_where_python_drops_docstrings(name):
    find_framework(name)
    module = f"sparse_mla.integrations.{name}"
    done = run_python("-OO", "-c", f"import {module} as m; print(m.merge_attn_states.__doc__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "None\n"


def test_objects_print_what_they_are():
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 2, "max_model_len": 3}
    config = sparse_mla.Config(4, softmax_scale=0.5, **limits)
    builder = sparse_mla.MetadataBuilder(config)
    v4_config = sparse_mla.v4.Config(4, **limits)
    v4_builder = sparse_mla.v4.MetadataBuilder(v4_config)
    weights = sparse_mla.v4.Weights(*5 * [None])
    starts, lens = np.array([0, 2], np.int32), np.array([3], np.int32)
    slots, table = np.array([5, 6]), np.zeros((1, 1), np.int32)
    common = sparse_mla.CommonAttentionMetadata(starts, lens, slots, table)
    for obj, facts in (
        (config, ["num_heads=4", "max_model_len=3"]),
        (builder, ["Config(", "workspace_bytes=0"]),
        (sparse_mla.SparseMLA(config), ["Config(", "W_UK=None"]),
        (common, ["seq_lens=int32[1]", "num_actual_tokens=2"]),
        (builder.build(common), ["path='bf16'", "block_table=int32[1, 1]"]),
        (sparse_mla.flash_mla.FlashMLASchedMeta(), ["have_initialized=False"]),
        (v4_builder, ["Config(num_heads=4", "workspace_bytes=0"]),
        (v4_builder.build(common), ["path='direct'", "swa_indices=int32[2, 128]", "layers={}"]),
        (sparse_mla.v4.SparseMLA(v4_config, 4, weights), ["Config(", "attn_sink=None"]),
    ):
        text = repr(obj)
        assert text.startswith(f"{type(obj).__name__}(")
        assert " object at 0x" not in text
        assert all(fact in text for fact in facts), text


@pytest.mark.parametrize("name", MODULES)
def test_tab_completion_offers_the_public_names(name):
    module = importlib.import_module(name)
    assert dir(module) == sorted(module.__all__)


# --- pages ---------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
FOLDERS_OF_PAGES = ("docs", "benchmarks", "csrc")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(page for name in FOLDERS_OF_PAGES for page in (ROOT / name).rglob("*.md")),
]
FOLDERS = ("benchmarks", "buildtools", "csrc", "docs", "examples", "sparse_mla", "tests")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_of_a_page_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*)`", text):
        assert any(ROOT.glob(path.rstrip("/"))), path


# Names of files that are not ours: Python's, and those of an engine.
FOREIGN_FILES = {"Python.h", "nsa_backend.py"}
OUR_FILES = {
    path.name
    for name in (*FOLDERS, "shim")
    for path in (ROOT / name).rglob("*.*")
    if "include" not in path.parts
} | {path.name for path in ROOT.glob("*.py")}


# Changes and records name files of their day.
PRESENT = [page for page in PAGES if "history" not in page.parts and page.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page):
    """Without a folder, as in `fp8_*.cuh` or `attention_NAME.c`."""
    names = set(re.findall(r"`([\w*]+\.(?:cuh?|c|h|pyi?|ipynb))`", page.read_text()))
    for name in names - FOREIGN_FILES:
        assert fnmatch.filter(OUR_FILES, name.replace("NAME", "*")), name


def test_a_missing_file_is_found():
    assert "array.c" in OUR_FILES
    assert fnmatch.filter(OUR_FILES, "fp8_*.cuh")
    assert not fnmatch.filter(OUR_FILES, "hopper_*.cuh")


@pytest.mark.parametrize("page", ["choosing_keys.md", "v4.md"])
def test_a_page_s_examples_run(page):
    """The tests of a framework run the examples that import it."""
    run_examples(page, "import numpy")


def test_the_examples_of_ranks_run():
    """In one session: later ones use what the first ones made."""
    text = (ROOT / "docs" / "parallel.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    chosen = [
        block for block in blocks if not re.search("^import (torch|jax)", block, re.MULTILINE)
    ]
    assert len(chosen) == 4
    exec(compile("\n".join(chosen), "parallel.md", "exec"), {})


def test_the_session_of_a_page_runs():
    failed, count = doctest.testfile(str(ROOT / "docs" / "mla.md"), module_relative=False)
    assert (failed, count > 10) == (0, True)


# What vLLM's backends (and a port of its FlashMLA backend with ixformer) are and call, and readers
# will search for.
ENGINE_NAMES = (
    "DeepseekSparseSWABackend",
    "DeepseekSparseSWAMetadata",
    "DeepseekSparseSWAMetadataBuilder",
    "DeepseekV4Attention",
    "DeepseekV4AttnBackend",
    "DeepseekV4Indexer",
    "FlashMLASparseImpl",
    "MLACommonBackend",
    "MLACommonImpl",
    "MLACommonMetadata",
    "MLACommonMetadataBuilder",
    "_cudagraph_support",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "current_workspace_manager",
    "dsa_convert_req_index_to_global_index",
    "flash_mla_sparse_prefill",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "reorder_batch",
    "reshape_attn_output_for_spec_decode",
    "reshape_query_for_spec_decode",
    "split_decodes_and_prefills",
    "split_prefill_chunks",
    "topk_indices_buffer",
    "triton_convert_req_index_to_global_index",
)


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_a_reader_finds_what_serves_an_engine_s_name(name):
    """The name is in the first column of a table's row, which says what serves it here."""
    rows = re.findall(r"^\| (.*?) \| (.+?) \|", (ROOT / "docs/coming_from.md").read_text(), re.M)
    assert any(re.search(rf"\b{name}\b", first) for first, _ in rows)
