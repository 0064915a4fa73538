"""The library as the operators' tests call it: on NumPy arrays, and on the session's device.

On the CPU the name `sparse_mla` of this module is the package itself. On CUDA it is a Library,
whose calls move their arrays to the GPU and back, even if they fail (device.py). Results of
operators that are exact to the byte are also compared with those of the CPU backend.
"""

from __future__ import annotations

import dataclasses
from weakref import WeakKeyDictionary

import numpy as np
import reference as ref
from device import DEVICE, HostCopy, Journey, address, host
from operators import FACTS, FRAMEWORK_CALLS

import sparse_mla as package


class Operator:
    """One of the package's functions, which gets its arrays on the device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.function = getattr(package, name)

    def __call__(self, *args, **kwargs):
        twin = None
        if self.name in EXACT:
            twin = Journey(HostCopy)
            twin_args = twin.put(args), {name: twin.put(x) for name, x in kwargs.items()}
        journey = Journey()
        try:
            got = self.function(
                *journey.put(args), **{name: journey.put(x) for name, x in kwargs.items()}
            )
            results = journey.results(got)
        finally:
            journey.fetch()
        if twin is not None and is_decided(self.name, args, kwargs):
            self.compare(journey, results, twin, twin_args)
        return results

    def compare(self, journey, results, twin, twin_args) -> None:
        """Checks that the CPU backend gives the same bytes, unless it refuses the values."""
        try:
            want = self.function(*twin_args[0], **twin_args[1])
        except ValueError:
            return
        for x, y in zip(
            *(x if isinstance(x, tuple) else (x,) for x in (results, want)), strict=True
        ):
            same = y is None if x is None else same_but_for_nan(x, np.asarray(y))
            assert same, f"{self.name}: not what the CPU gives"
        for place, (_, memory, _) in journey.copies.items():
            after = twin.copies[place][2].read()
            if self.name != "gather_kv_cache":  # compared above, any NaN equal to any NaN
                assert np.array_equal(memory, after), f"{self.name}: memory unlike the CPU's"


EXACT = ("split_kv_b_proj", *(op for op, facts in FACTS.items() if facts.is_exact))


PROJECTIONS = ("k_up_proj", "v_up_proj", "kv_up_proj", "grouped_output_projection")


def is_decided(name, args, kwargs) -> bool:
    """Whether the result is unique. It is not if two tokens go to one slot: either may win. Nor is
    it if merged lists share a position."""
    given = dict(zip(FACTS[name].positional.split(), args, strict=False)) if name in FACTS else {}
    given |= kwargs
    if name == "top_k_merge":
        return all(are_unique(x) for x in np.asarray(given["indices"]).swapaxes(0, 1))
    slots = given.get(FACTS[name].slots) if name in FACTS else None
    return slots is None or are_unique(np.asarray(slots))


def are_unique(slots: np.ndarray) -> bool:
    """Whether no slot or position stands twice; negative ones are none."""
    slots = slots[slots >= 0]
    return len(np.unique(slots)) == len(slots)


def same_but_for_nan(x: np.ndarray, y: np.ndarray) -> bool:
    """Bit equality, except that any NaN of a floating-point type equals any NaN."""
    if x.dtype == np.uint8 and y.dtype == ref.E4M3:  # from a framework without that type
        y = y.view(np.uint8)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.dtype.kind in "iub":
        return np.array_equal(x, y)
    with np.errstate(invalid="ignore"):  # signalling NaN
        nan, nan_too = np.isnan(x), np.isnan(y)
    zero = np.zeros((), x.dtype)
    x, y = np.where(nan, zero, x), np.where(nan, zero, y)
    return np.array_equal(nan, nan_too) and x.tobytes() == y.tobytes()


class MetadataBuilder:
    """The package's MetadataBuilder, with the workspace and each step's arrays on the device."""

    arrays = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")

    def __init__(self, config, *, workspace=None) -> None:
        self.kept = Journey()
        self.builder = package.MetadataBuilder(config, workspace=self.kept.put(workspace))

    def build(self, common, **options):
        step = Journey(former=self.kept)
        moved = {name: step.put(getattr(common, name)) for name in self.arrays}
        metadata = self.builder.build(dataclasses.replace(common, **moved), **options)
        steps[metadata] = step
        return metadata


steps: WeakKeyDictionary = WeakKeyDictionary()


class SparseMLA:
    """The package's SparseMLA, with its weights and the arrays of its calls on the device."""

    def __init__(self, config, *, kv_b_proj=None, weight_scale_inv=None) -> None:
        kept = Journey()
        self.layer = package.SparseMLA(
            config, kv_b_proj=kept.put(kv_b_proj), weight_scale_inv=kept.put(weight_scale_inv)
        )

    def forward(self, q, kv_cache, topk_indices, metadata, **options):
        return self._call(self.layer.forward, (q, kv_cache, topk_indices, metadata), options)

    def k_up_proj(self, x, **options):
        return self._call(self.layer.k_up_proj, (x,), options)

    def v_up_proj(self, x, **options):
        return self._call(self.layer.v_up_proj, (x,), options)

    def _call(self, function, args, options):
        former = steps.get(args[-1]) if isinstance(args[-1], package.Metadata) else None
        journey = Journey(former=former)
        try:
            options = {name: journey.put(x) for name, x in options.items()}
            return journey.results(function(*journey.put(args), **options))
        finally:
            journey.fetch()

    @property
    def W_UK(self) -> np.ndarray:
        return host(self.layer.W_UK)

    @property
    def W_UV(self) -> np.ndarray:
        return host(self.layer.W_UV)


class V4MetadataBuilder:
    """The package's v4.MetadataBuilder, with the workspace and each step's arrays on the device."""

    def __init__(self, config, *, workspace=None) -> None:
        self.kept = Journey()
        self.builder = package.v4.MetadataBuilder(config, workspace=self.kept.put(workspace))

    def build(self, common, **tables):
        step = Journey(former=self.kept)
        moved = {name: step.put(getattr(common, name)) for name in MetadataBuilder.arrays}
        tables = {
            name: {ratio: step.put(x) for ratio, x in table.items()}
            if isinstance(table, dict)
            else step.put(table)
            for name, table in tables.items()
        }
        metadata = self.builder.build(dataclasses.replace(common, **moved), **tables)
        steps[metadata] = step
        return metadata


class V4SparseMLA:
    """The package's v4.SparseMLA, with its weights and the arrays of its calls on the device."""

    def __init__(self, config, compress_ratio, weights) -> None:
        self.kept = Journey()
        moved = {name: self.kept.put(x) for name, x in vars(weights).items()}
        weights = dataclasses.replace(weights, **moved)
        self.layer = package.v4.SparseMLA(config, compress_ratio, weights)

    def attend(self, q, caches, metadata, topk_indices=None, **options):
        journey = Journey(former=None if metadata is None else steps[metadata])
        try:
            options = {name: journey.put(x) for name, x in options.items()}
            moved = {name: journey.put(x) for name, x in vars(caches).items()}
            caches = dataclasses.replace(caches, **moved)
            q, topk_indices = journey.put((q, topk_indices))
            got = self.layer.attend(q, caches, metadata, topk_indices, **options)
            return journey.results(got)
        finally:
            journey.fetch()


class V4Library:
    """The package's module v4; its classes that take arrays are replaced by those above."""

    MetadataBuilder, SparseMLA = V4MetadataBuilder, V4SparseMLA

    def __getattr__(self, name):
        return getattr(package.v4, name)


class Library:
    """The package; its functions and classes that take arrays are replaced by those above."""

    operators = ("split_kv_b_proj", *FRAMEWORK_CALLS)

    def __init__(self) -> None:
        vars(self).update({name: Operator(name) for name in self.operators})
        self.MetadataBuilder, self.SparseMLA = MetadataBuilder, SparseMLA
        self.v4 = V4Library()

    def __getattr__(self, name):
        return getattr(package, name)


sparse_mla = package if DEVICE == "cpu" else Library()

# The instruction sets that this machine's CPU has, for SPARSE_MLA_CPU_ISA.
ISAS = [row["arch"] for row in package.kernels() if row["device"] == "cpu" and row["available"]]


def refers_to(metadata, got, x: np.ndarray) -> bool:
    """Whether `got`, an array of `metadata`, lies in the memory of `x` or of its device copy."""
    if DEVICE == "cpu":
        return np.shares_memory(got, x)
    theirs = steps[metadata].moved[id(x)][1]
    return address(got) == address(theirs)
