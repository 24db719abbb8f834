"""Recognises the Llama pattern: weights by what is done with them, in the order of the graph, whatever they are called.

Each layer is a norm, queries, keys and values (or one product for all three), attention, a product, a norm, gate and
up (or one product for both), silu, a product; each half is added to what came in. What is recognised here is enough to
know which tensor is which; whether the graphs compute what our blocks compute, only running both can say.
"""

from collections.abc import Sequence
from itertools import pairwise

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.llama.embedding import embedding
from blockrelay.onnx_blocks.llama.graph import Constant, Graph, Node, own_name
from blockrelay.onnx_blocks.llama.model import Llama, Part, RowPlaces
from blockrelay.onnx_blocks.llama.operators import Norm, Product, Weight, norms, products
from blockrelay.onnx_blocks.llama.rotation import in_the_making_of_cosines, rotation
from blockrelay.onnx_blocks.llama.trails import Sources, Trail

_ATTENTION = "GroupQueryAttention"
#: A sigmoid that is multiplied with what goes into it is silu; the others are silu as one operator.
_SILU = ("Sigmoid", "Silu", "Swish", "QuickGelu")
_EPSILON_DIFFERS = 1e-4


def recognise(graph: Graph) -> Llama:
    """Raises OnnxBlocksError that names file and tensor of what is not as in a Llama."""
    return _Recognition(graph).llama()


class _Recognition:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._file = graph.nodes[0].file
        angles = in_the_making_of_cosines(graph)
        found = [product for product in products(graph) if product.node.outputs[0] not in angles]
        self._products = found
        by_output = {product.output: product for product in found}
        self._sources = Sources(graph, by_output, {norm.output: norm for norm in norms(graph)})
        all_norms = sorted(self._sources.norms.values(), key=lambda norm: norm.place)
        of_heads = {
            norm.output: trail
            for norm in all_norms
            if len(norm.inputs) == 1 and (trail := self._sources.trail(norm.inputs[0])) is not None
        }
        self._head_norms = of_heads
        self._norms = [norm for norm in all_norms if norm.output not in of_heads]
        self._parts: dict[str, Part] = {}
        self._head_dim = self._heads = self._kv_heads = 0
        self._biased: set[bool] = set()
        self._normed_heads: set[bool] = set()

    def llama(self) -> Llama:
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
            raise OnnxBlocksError(
                f"is the last of {len(self._norms)} norms of rows; a Llama of {count} layers has {2 * count + 1}",
                file=last.file,
                tensor=own_name(last.outputs[0]),
            )
        return count

    def _between(self, first: int, end: int) -> list[Product]:
        return [product for product in self._products if first < product.place < end]

    def _attention(self, layer: int, norm: Norm, found: Sequence[Product]) -> None:
        at = f"model.layers.{layer}"
        self._add(f"{at}.input_layernorm.weight", norm.weight, 0, norm.weight.size)
        projections = [product for product in found if self._is_fed(product, norm)]
        self._add_the_other(f"{at}.self_attn.o_proj.weight", found, projections, norm, "attention")
        keys, key_norms = self._made_of(layer, "key")
        values, _ = self._made_of(layer, "value")
        if keys not in projections or values not in projections:
            raise self._error(
                keys.node,
                f"is in the {'keys' if keys not in projections else 'values'} of layer {layer}, and not of its norm",
            )
        wide = self._parts[f"{at}.self_attn.o_proj.weight"].shape[1]
        if keys is values:
            self._check_count(projections, 1, norm)
            both = keys.weight.outputs - wide
            bounds = [0, wide, wide + both // 2, wide + both]
            if both <= 0 or both % 2:
                raise self._error(
                    keys.node, f"gives {wide + both} numbers for queries, keys and values, of which {wide} are queries"
                )
            of = [(keys, first, stop) for first, stop in pairwise(bounds)]
        else:
            self._check_count(projections, 3, norm)
            (queries,) = (one for one in projections if one is not keys and one is not values)
            of = [(one, 0, one.weight.outputs) for one in (queries, keys, values)]
        for name, (product, first, stop) in zip("qkv", of, strict=True):
            self._add(f"{at}.self_attn.{name}_proj.weight", product.weight, first, stop)
            self._biased.add(product.bias is not None)
            if product.bias is not None:
                self._add(f"{at}.self_attn.{name}_proj.bias", product.bias, first, stop)
        self._count_heads(keys.node, wide, of[1][2] - of[1][1])
        self._norms_of_heads(layer, projections, key_norms)

    def _made_of(self, layer: int, half: str) -> tuple[Product, list[Norm]]:
        """The product that gives the keys or values of a layer, and the norms of heads behind it."""
        present = self._graph.presents[layer, half]
        node = self._graph.makers.get(present)
        if node is None:
            raise OnnxBlocksError("is made by no operator", file=self._file, tensor=own_name(present))
        start = present
        if node.kind == _ATTENTION:
            start = (node.input(1) if half == "key" else node.input(2)) or node.input(0)
        found, passed = self._sources.behind(start)
        if len(found) != 1:
            raise self._error(
                node,
                f"is the {half}s of layer {layer} and made of {len(found)} products with weights instead of one",
                present,
            )
        return found[0], [norm for norm in passed if norm.output in self._head_norms]

    def _count_heads(self, node: Node, wide: int, narrow: int) -> None:
        """From what caches declare, or else from what the operator for attention does."""
        dims = self._graph.cache_dims
        head_dim = dims[3] if len(dims) == 4 and isinstance(dims[3], int) else 0
        for one in self._graph.nodes if not head_dim else ():
            if one.kind == _ATTENTION:
                head_dim = narrow // max(1, int(one.number("kv_num_heads", 0)))
                break
        if not head_dim or wide % head_dim or narrow % head_dim or (wide // head_dim) % (narrow // head_dim):
            raise self._error(
                node,
                f"gives {narrow} numbers of keys and {wide} of queries: no heads of {head_dim or 'a known size'}",
            )
        found = (head_dim, wide // head_dim, narrow // head_dim)
        if self._head_dim and found != (self._head_dim, self._heads, self._kv_heads):
            raise self._error(node, f"has {found[1]} and {found[2]} heads of {head_dim}, not as the layers before it")
        self._head_dim, self._heads, self._kv_heads = found

    def _norms_of_heads(self, layer: int, projections: Sequence[Product], of_keys: Sequence[Norm]) -> None:
        found = [self._sources.norms[name] for name, trail in self._head_norms.items() if trail.product in projections]
        self._normed_heads.add(bool(found))
        if not found:
            return
        if len(found) != 2 or len(of_keys) != 1:
            raise self._error(
                found[0].node,
                f"is one of {len(found)} norms of heads in layer {layer}, of which {len(of_keys)} are the keys'",
            )
        (of_queries,) = (norm for norm in found if norm is not of_keys[0])
        for name, norm in (("q", of_queries), ("k", of_keys[0])):
            self._add(f"model.layers.{layer}.self_attn.{name}_norm.weight", norm.weight, 0, norm.weight.size)

    def _mlp(self, layer: int, norm: Norm, found: Sequence[Product]) -> None:
        at = f"model.layers.{layer}"
        self._add(f"{at}.post_attention_layernorm.weight", norm.weight, 0, norm.weight.size)
        both = [product for product in found if self._is_fed(product, norm)]
        self._add_the_other(f"{at}.mlp.down_proj.weight", found, both, norm, "the MLP")
        for product in (*both, *(product for product in found if product not in both)):
            self._check_no_bias(product)
        gate = self._gate(both, norm)
        if len(both) == 1:
            half = gate.product.weight.outputs // 2
            order = ("gate", "up") if gate.is_first is not False else ("up", "gate")
            for name, first in zip(order, (0, half), strict=True):
                self._add(f"{at}.mlp.{name}_proj.weight", gate.product.weight, first, first + half)
            return
        self._check_count(both, 2, norm)
        (up,) = (product for product in both if product is not gate.product)
        for name, product in (("gate", gate.product), ("up", up)):
            self._add(f"{at}.mlp.{name}_proj.weight", product.weight, 0, product.weight.outputs)

    def _gate(self, both: Sequence[Product], norm: Norm) -> Trail:
        """The product that silu follows."""
        for node in self._graph.nodes:
            if node.kind in _SILU:
                trail = self._sources.trail(node.input(0))
                if trail is not None and trail.product in both:
                    return trail
        named = both[0].node if both else norm.node
        raise self._error(
            named, "is not followed by silu, nor is the product beside it: another activation than Llama's"
        )

    def _head(self, norm: Norm, first: int) -> Product:
        self._add("model.norm.weight", norm.weight, 0, norm.weight.size)
        found = self._between(first, len(self._graph.nodes))
        fed = [product for product in found if self._is_fed(product, norm)]
        if len(found) != 1 or len(fed) != 1:
            raise self._error(
                norm.node, f"is the last norm, and {len(found)} products follow it instead of the head alone"
            )
        self._check_no_bias(fed[0])
        self._add("lm_head.weight", fed[0].weight, 0, fed[0].weight.outputs)
        return fed[0]

    def _add_the_other(
        self, name: str, found: Sequence[Product], fed: Sequence[Product], norm: Norm, what: str
    ) -> None:
        others = [product for product in found if product not in fed]
        if len(others) != 1:
            node = others[-1].node if others else norm.node
            raise self._error(
                node, f"ends {what} with {len(others)} products that its norm does not feed, where Llama has one"
            )
        self._check_no_bias(others[0])
        self._add(name, others[0].weight, 0, others[0].weight.outputs)

    def _is_fed(self, product: Product, norm: Norm) -> bool:
        return self._sources.same(product.input) == norm.output

    def _check_count(self, found: Sequence[Product], count: int, norm: Norm) -> None:
        if len(found) != count:
            raise self._error(norm.node, f"goes into {len(found)} products with weights instead of {count}")

    def _check_no_bias(self, product: Product) -> None:
        if product.bias is not None:
            raise OnnxBlocksError(
                "is a bias, which Llama has for queries, keys and values only",
                file=product.bias.file,
                tensor=product.bias.name,
            )

    def _epsilon(self) -> float:
        known = self._norms[0].epsilon
        for norm in self._sources.norms.values():
            if abs(norm.epsilon - known) > _EPSILON_DIFFERS * known:
                raise self._error(
                    norm.node,
                    f"is a norm with epsilon {norm.epsilon:g}, and the first one has {known:g}: a block folder has one",
                )
        return known

    def _one_of(self, found: set[bool], what: str) -> bool:
        if len(found) != 1:
            raise OnnxBlocksError(f"and those that follow have {what} in some layers only", file=self._file)
        return next(iter(found))

    def _add(self, name: str, source: Constant | Weight, first: int, stop: int) -> None:
        self._parts[name] = Part(source, first, stop)

    def _error(self, node: Node, message: str, tensor: str = "") -> OnnxBlocksError:
        return OnnxBlocksError(message, file=node.file, tensor=own_name(tensor or node.outputs[0]))
