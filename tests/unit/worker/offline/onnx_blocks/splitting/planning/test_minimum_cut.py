"""Minimum cuts of small graphs, beside all cuts that there are."""

from collections.abc import Iterable
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from blockrelay_worker.offline.onnx_blocks.splitting.planning.minimum_cut import minimum_cut

Edges = frozenset[tuple[str, str]]


def parts(cut: Iterable[str], edges: Edges) -> bool:
    """Whether no way leads from a to z but through the cut."""
    reached, todo = set(cut), [] if "a" in cut else ["a"]
    while todo:
        one = todo.pop()
        if one == "z":
            return False
        for start, end in edges:
            if start == one and end not in reached:
                reached.add(end)
                todo.append(end)
    return True


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[str, int], Edges]:
    """From a to z, with edges along the alphabet."""
    names = ["a", *"bcdefg"[: draw(st.integers(1, 6))], "z"]
    pairs = list(combinations(names, 2))
    edges = draw(st.frozensets(st.sampled_from(pairs), max_size=14)) - {("a", "z")}
    weights = {name: draw(st.integers(1, 4)) for name in names}
    return weights, frozenset(edges)


@given(graphs())
def test_no_cut_is_lighter(graph: tuple[dict[str, int], Edges]) -> None:
    weights, edges = graph
    inner = [name for name in weights if name != "z"]
    cuts = [cut for size in range(len(inner) + 1) for cut in combinations(inner, size) if parts(cut, edges)]
    lightest = min(sum(weights[name] for name in cut) for cut in cuts)
    first = minimum_cut(weights, edges, sources={"a"}, sinks={"z"}, nearest_to="sources")
    last = minimum_cut(weights, edges, sources={"a"}, sinks={"z"}, nearest_to="sinks")
    assert first is not None and last is not None
    for found in (first, last):
        assert sum(weights[name] for name in found.vertices) == lightest and parts(found.vertices, edges)
        assert found.vertices <= found.before and "z" not in found.before
    assert first.before <= last.before


def test_of_equal_cuts_the_nearest() -> None:
    weights = {"a": 3, "b": 2, "c": 5, "d": 2, "z": 9}
    edges = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "z")]
    first = minimum_cut(weights, edges, sources={"a"}, sinks={"z"}, nearest_to="sources")
    last = minimum_cut(weights, edges, sources={"a"}, sinks={"z"}, nearest_to="sinks")
    assert first is not None and first.vertices == {"b"} and first.before == {"a", "b"}
    assert last is not None and last.vertices == {"d"} and last.before == {"a", "b", "c", "d"}


def test_a_source_that_is_a_sink_cannot_be_parted() -> None:
    assert minimum_cut({"a": 1}, [], sources={"a"}, sinks={"a"}, nearest_to="sources") is None
