"""Recognises the Llama pattern: finds weights by what the graph does with them, not by their names.

A layer is: a norm; queries, keys and values (three linear layers, or one); attention; a linear layer; a norm; gate and
up (two linear layers, or one); silu; a linear layer. Attention and MLP are each added to what came in. This tells which
tensor is which. Only running both shows whether the graphs compute what our blocks compute: `blockrelay import` does.
"""

from collections.abc import Sequence
from itertools import pairwise

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.llama.embedding import embedding
from blockrelay.onnx_blocks.llama.graph import Constant, Graph, Node, own_name
from blockrelay.onnx_blocks.llama.model import Llama, RowPlaces, TensorSlice
from blockrelay.onnx_blocks.llama.operators import LinearLayer, RmsNorm, Weight, linear_layers, norms
from blockrelay.onnx_blocks.llama.rotation import rotation, tensors_behind_cosines
from blockrelay.onnx_blocks.llama.trails import Sources, Trail

_ATTENTION = "GroupQueryAttention"
#: Operators of silu: it is one operator, or a sigmoid that is multiplied by its input.
_SILU = ("Sigmoid", "Silu", "Swish", "QuickGelu")
#: Relative difference from which two epsilons are not the same.
_EPSILON_DIFFERS = 1e-4


def recognise(graph: Graph) -> Llama:
    """Returns the Llama that the joined graph of all blocks is.

    Raises OnnxBlocksError that names file and tensor of what is not as in a Llama.
    """
    return _Recognition(graph).llama()


class _Recognition:
    """Collects the parts of a Llama, layer by layer. For one graph, and used once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._file = graph.nodes[0].file
        angles = tensors_behind_cosines(graph)
        self._linears = [linear for linear in linear_layers(graph) if linear.node.outputs[0] not in angles]
        by_output = {linear.output: linear for linear in self._linears}
        self._sources = Sources(graph, by_output, {norm.output: norm for norm in norms(graph)})
        all_norms = sorted(self._sources.norms.values(), key=lambda norm: norm.place)
        #: Norms of single heads of queries and keys, by their outputs. All others are norms of whole rows.
        self._head_norms = {
            norm.output: trail
            for norm in all_norms
            if len(norm.inputs) == 1 and (trail := self._sources.trail(norm.inputs[0])) is not None
        }
        self._norms = [norm for norm in all_norms if norm.output not in self._head_norms]
        self._parts: dict[str, TensorSlice] = {}
        self._head_dim = self._heads = self._kv_heads = 0
        self._biased: set[bool] = set()
        self._normed_heads: set[bool] = set()

    def llama(self) -> Llama:
        """Returns the Llama. Raises OnnxBlocksError."""
        count = self._layer_count()
        hidden = self._norms[0].weight.size
        table = embedding(self._graph, self._sources, file=self._file, hidden=hidden)
        tokens = table.outputs if isinstance(table, Weight) else table.shape[0]
        self._add("model.embed_tokens.weight", table, 0, tokens)
        bounds = [norm.place for norm in self._norms] + [len(self._graph.nodes)]
        places: list[RowPlaces] = []
        for layer in range(count):
            attention, mlp, following = self._norms[2 * layer : 2 * layer + 3]
            first, middle, end = bounds[2 * layer : 2 * layer + 3]
            self._attention(layer, attention, self._between(first, middle))
            self._mlp(layer, mlp, self._between(middle, end))
            places.append(
                RowPlaces(
                    tuple(map(self._graph.place, following.inputs)),
                    self._graph.place(self._graph.presents[layer, "key"]),
                    self._graph.place(self._graph.presents[layer, "value"]),
                )
            )
        head = self._head(self._norms[-1], bounds[-2])
        return Llama(
            parts=self._parts,
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            epsilon=self._epsilon(),
            qkv_bias=self._one_of(self._biased, "biases of queries, keys and values"),
            qk_norm=self._one_of(self._normed_heads, "norms of queries and keys"),
            rotary=rotation(self._graph, file=self._file, head_dim=self._head_dim),
            layers=tuple(places),
            logits=self._graph.place(head.output),
        )

    def _layer_count(self) -> int:
        """Returns the number of layers, by their caches. Raises OnnxBlocksError unless the norms fit that number."""
        layers = {layer for layer, _ in self._graph.presents}
        count = len(layers)
        if not count or layers != set(range(count)):
            raise OnnxBlocksError(
                f"has the caches of layers {sorted(layers)}, not of 0 and all that follow", file=self._file
            )
        if not self._norms:
            raise OnnxBlocksError(f"has no RMS norms; a Llama of {count} layers has {2 * count + 1}", file=self._file)
        if len(self._norms) != 2 * count + 1:
            last = self._norms[-1].node
            raise last.error(
                f"is the last of {len(self._norms)} norms of rows; a Llama of {count} layers has {2 * count + 1}"
            )
        return count

    def _between(self, first: int, end: int) -> list[LinearLayer]:
        """Returns the linear layers between the places `first` and `end` of the graph."""
        return [linear for linear in self._linears if first < linear.place < end]

    def _attention(self, layer: int, norm: RmsNorm, linears: Sequence[LinearLayer]) -> None:
        """Adds the parts of a layer's attention: `norm`, and the linear layers between it and the next norm."""
        at = f"model.layers.{layer}"
        self._add(f"{at}.input_layernorm.weight", norm.weight, 0, norm.weight.size)
        projections = [linear for linear in linears if self._is_fed(linear, norm)]
        self._add_the_other(f"{at}.self_attn.o_proj.weight", linears, projections, norm, "attention")
        keys, key_norms = self._source_of(layer, "key")
        values, _ = self._source_of(layer, "value")
        if keys not in projections or values not in projections:
            raise keys.node.error(
                f"is in the {'keys' if keys not in projections else 'values'} of layer {layer}, and not of its norm",
            )
        wide = self._parts[f"{at}.self_attn.o_proj.weight"].shape[1]  # numbers in the queries of a row
        if keys is values:
            self._check_count(projections, 1, norm)
            both = keys.weight.outputs - wide
            bounds = [0, wide, wide + both // 2, wide + both]
            if both <= 0 or both % 2:
                raise keys.node.error(
                    f"gives {wide + both} numbers for queries, keys and values, of which {wide} are queries"
                )
            parts = [(keys, first, stop) for first, stop in pairwise(bounds)]
        else:
            self._check_count(projections, 3, norm)
            (queries,) = (each for each in projections if each is not keys and each is not values)
            parts = [(each, 0, each.weight.outputs) for each in (queries, keys, values)]
        for name, (linear, first, stop) in zip("qkv", parts, strict=True):
            self._add(f"{at}.self_attn.{name}_proj.weight", linear.weight, first, stop)
            self._biased.add(linear.bias is not None)
            if linear.bias is not None:
                self._add(f"{at}.self_attn.{name}_proj.bias", linear.bias, first, stop)
        self._count_heads(keys.node, wide, parts[1][2] - parts[1][1])
        self._norms_of_heads(layer, projections, key_norms)

    def _source_of(self, layer: int, half: str) -> tuple[LinearLayer, list[RmsNorm]]:
        """Returns the linear layer that the keys or values of a layer come from, and the norms of heads behind it."""
        present = self._graph.presents[layer, half]
        node = self._graph.makers.get(present)
        if node is None:
            raise OnnxBlocksError("is made by no operator", file=self._file, tensor=own_name(present))
        start = present
        if node.kind == _ATTENTION:
            start = (node.input(1) if half == "key" else node.input(2)) or node.input(0)
        sources, passed = self._sources.behind(start)
        if len(sources) != 1:
            raise node.error(
                f"is the {half}s of layer {layer} and comes from {len(sources)} linear layers instead of one",
                present,
            )
        return sources[0], [norm for norm in passed if norm.output in self._head_norms]

    def _count_heads(self, node: Node, wide: int, narrow: int) -> None:
        """Finds the width and number of heads, from what caches declare or else from the operator for attention.

        `wide` and `narrow` are the numbers in a row's queries and keys.
        """
        dims = self._graph.cache_dims
        head_dim = dims[3] if len(dims) == 4 and isinstance(dims[3], int) else 0
        for candidate in self._graph.nodes if not head_dim else ():
            if candidate.kind == _ATTENTION:
                head_dim = narrow // max(1, int(candidate.number("kv_num_heads", 0)))
                break
        if not head_dim or wide % head_dim or narrow % head_dim or (wide // head_dim) % (narrow // head_dim):
            raise node.error(
                f"gives {narrow} numbers of keys and {wide} of queries: no heads of {head_dim or 'a known size'}",
            )
        heads, kv_heads = wide // head_dim, narrow // head_dim
        if self._head_dim and (head_dim, heads, kv_heads) != (self._head_dim, self._heads, self._kv_heads):
            raise node.error(f"has {heads} and {kv_heads} heads of {head_dim}, not as the layers before it")
        self._head_dim, self._heads, self._kv_heads = head_dim, heads, kv_heads

    def _norms_of_heads(self, layer: int, projections: Sequence[LinearLayer], of_keys: Sequence[RmsNorm]) -> None:
        """Adds the norms of heads of queries and keys of a layer, if it has them."""
        own = [self._sources.norms[name] for name, trail in self._head_norms.items() if trail.linear in projections]
        self._normed_heads.add(bool(own))
        if not own:
            return
        if len(own) != 2 or len(of_keys) != 1:
            raise own[0].node.error(
                f"is one of {len(own)} norms of heads in layer {layer}, of which {len(of_keys)} are the keys'",
            )
        (of_queries,) = (norm for norm in own if norm is not of_keys[0])
        for name, norm in (("q", of_queries), ("k", of_keys[0])):
            self._add(f"model.layers.{layer}.self_attn.{name}_norm.weight", norm.weight, 0, norm.weight.size)

    def _mlp(self, layer: int, norm: RmsNorm, linears: Sequence[LinearLayer]) -> None:
        """Adds the parts of a layer's MLP: `norm`, and the linear layers between it and the next norm."""
        at = f"model.layers.{layer}"
        self._add(f"{at}.post_attention_layernorm.weight", norm.weight, 0, norm.weight.size)
        both = [linear for linear in linears if self._is_fed(linear, norm)]
        self._add_the_other(f"{at}.mlp.down_proj.weight", linears, both, norm, "the MLP")
        for linear in (*both, *(linear for linear in linears if linear not in both)):
            self._check_no_bias(linear)
        gate = self._gate(both, norm)
        if len(both) == 1:
            half = gate.linear.weight.outputs // 2
            order = ("gate", "up") if gate.is_first is not False else ("up", "gate")
            for name, first in zip(order, (0, half), strict=True):
                self._add(f"{at}.mlp.{name}_proj.weight", gate.linear.weight, first, first + half)
            return
        self._check_count(both, 2, norm)
        (up,) = (linear for linear in both if linear is not gate.linear)
        for name, linear in (("gate", gate.linear), ("up", up)):
            self._add(f"{at}.mlp.{name}_proj.weight", linear.weight, 0, linear.weight.outputs)

    def _gate(self, both: Sequence[LinearLayer], norm: RmsNorm) -> Trail:
        """Returns the linear layer that silu follows, of those that `norm` feeds."""
        for node in self._graph.nodes:
            if node.kind in _SILU:
                trail = self._sources.trail(node.input(0))
                if trail is not None and trail.linear in both:
                    return trail
        named = both[0].node if both else norm.node
        raise named.error("is not followed by silu, nor is the linear layer beside it: another activation than Llama's")

    def _head(self, norm: RmsNorm, first: int) -> LinearLayer:
        """Adds the last norm and the head behind it, and returns the head."""
        self._add("model.norm.weight", norm.weight, 0, norm.weight.size)
        linears = self._between(first, len(self._graph.nodes))
        fed = [linear for linear in linears if self._is_fed(linear, norm)]
        if len(linears) != 1 or len(fed) != 1:
            raise norm.node.error(
                f"is the last norm, and {len(linears)} linear layers follow it instead of the head alone"
            )
        self._check_no_bias(fed[0])
        self._add("lm_head.weight", fed[0].weight, 0, fed[0].weight.outputs)
        return fed[0]

    def _add_the_other(
        self, name: str, linears: Sequence[LinearLayer], fed: Sequence[LinearLayer], norm: RmsNorm, what: str
    ) -> None:
        """Adds as `name` the one of the linear layers `linears` that is not in `fed`, those that the norm feeds.

        `what` names the part of the layer in messages.
        """
        others = [linear for linear in linears if linear not in fed]
        if len(others) != 1:
            node = others[-1].node if others else norm.node
            raise node.error(
                f"ends {what} with {len(others)} linear layers that its norm does not feed, where Llama has one"
            )
        self._check_no_bias(others[0])
        self._add(name, others[0].weight, 0, others[0].weight.outputs)

    def _is_fed(self, linear: LinearLayer, norm: RmsNorm) -> bool:
        return self._sources.same(linear.input) == norm.output

    def _check_count(self, linears: Sequence[LinearLayer], count: int, norm: RmsNorm) -> None:
        if len(linears) != count:
            raise norm.node.error(f"goes into {len(linears)} linear layers instead of {count}")

    def _check_no_bias(self, linear: LinearLayer) -> None:
        if linear.bias is not None:
            raise linear.bias.error("is a bias, which Llama has for queries, keys and values only")

    def _epsilon(self) -> float:
        """Returns the epsilon that all norms have. Raises OnnxBlocksError if they differ."""
        known = self._norms[0].epsilon
        for norm in self._sources.norms.values():
            if abs(norm.epsilon - known) > _EPSILON_DIFFERS * known:
                raise norm.node.error(
                    f"is a norm with epsilon {norm.epsilon:g}, and the first one has {known:g}: a block folder has one",
                )
        return known

    def _one_of(self, values: set[bool], what: str) -> bool:
        """Returns the only one of `values`. Raises OnnxBlocksError if some layers have `what` and others do not."""
        if len(values) != 1:
            raise OnnxBlocksError(f"and those that follow have {what} in some layers only", file=self._file)
        return next(iter(values))

    def _add(self, name: str, source: Constant | Weight, first: int, stop: int) -> None:
        self._parts[name] = TensorSlice(source, first, stop)
