"""A minimal Llama in torch: enough to train one and to write it in the Hugging Face layout."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from blockrelay_storyteller import start
from blockrelay_storyteller.start import Shape


class TorchLinear(nn.Linear):
    """A linear layer without bias that can round as the w8a8 executor does.

    With `quantised`, each row of the input is rounded to 8 bits by its largest magnitude, and each output channel has
    one weight scale. The result equals the executor's up to the order of float additions (docs/quantisation.md).
    Gradients pass straight through.
    """

    quantised = False

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=1 / math.sqrt(inputs))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if not self.quantised:
            return F.linear(x, self.weight)
        return F.linear(_rounded(x, 1e-12), _rounded(self.weight, 1e-12))


def _rounded(x: Tensor, floor: float) -> Tensor:
    """Rounds each row (last axis) to 255 levels around zero. The gradient is that of the identity."""
    exact = x.detach().float()
    scale = exact.abs().amax(dim=-1, keepdim=True) / 127 + floor
    rounded = ((exact / scale).round() * scale).to(x.dtype)
    return x + (rounded - x.detach())


class Norm(nn.Module):
    """The RMS norm of a Llama, computed in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.epsilon).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding. The output projection begins at zero."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = TorchLinear(shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = TorchLinear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = TorchLinear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = TorchLinear(shape.heads * shape.head_dim, shape.hidden)
        nn.init.zeros_(self.o_proj.weight)

    def projections(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the weights of q, k, v and o, each [outputs, inputs]."""
        return self.q_proj.weight, self.k_proj.weight, self.v_proj.weight, self.o_proj.weight

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the attention of `x` [batch, length, hidden], in the same shape.

        `cos` and `sin` are [length, head_dim/2]. `mask` is bool [batch, 1, length, length], True where a position may
        attend; None: causal.
        """
        batch, length, _ = x.shape
        s = self.shape
        q = _rotate(self.q_proj(x).view(batch, length, s.heads, s.head_dim).transpose(1, 2), cos, sin)
        k = _rotate(self.k_proj(x).view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2)
        k = k.repeat_interleave(s.heads // s.kv_heads, dim=1)
        v = v.repeat_interleave(s.heads // s.kv_heads, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding ("rotate half") to `x` [batch, heads, length, head_dim].

    `cos` and `sin` are [length, head_dim/2].
    """
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class Mlp(nn.Module):
    """The SwiGLU MLP of a layer. The down projection begins at zero."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = TorchLinear(shape.hidden, shape.mlp)
        self.up_proj = TorchLinear(shape.hidden, shape.mlp)
        self.down_proj = TorchLinear(shape.mlp, shape.hidden)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TorchLayer(nn.Module):
    """A transformer layer: attention and MLP, each after a norm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the layer's output for `x` [batch, length, hidden]; `cos`, `sin` and `mask` as in `Attention`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class TorchLlama(nn.Module):
    """A Llama with the parameter names of transformers' LlamaForCausalLM.

    It begins with the weights that `start` sets, which limit its shape (see `Shape`).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.model.layers = nn.ModuleList(TorchLayer(shape) for _ in range(shape.layers))
        self.model.norm = Norm(shape.hidden, shape.epsilon)
        self.lm_head = TorchLinear(shape.hidden, shape.vocab)
        with torch.no_grad():
            start.embedding_and_head(self.model.embed_tokens.weight, self.lm_head.weight)
            first, second = (layer.self_attn.projections() for layer in self.model.layers[:2])
            start.match(*second, start.look_back(*first, shape), shape)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns logits [batch, length, vocab] for `ids` [batch, length].

        `mask` is bool [batch, 1, length, length], True where a position may attend; None: causal.
        """
        half = self.shape.head_dim // 2
        steps = torch.arange(half, device=ids.device, dtype=torch.float32)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.shape.theta ** (-steps / half)
        x = self.model.embed_tokens(ids)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return self.lm_head(self.model.norm(x))

    def quantise(self, on: bool) -> None:
        """Switches the rounding of all linear layers, the head included, on or off."""
        for module in self.modules():
            if isinstance(module, TorchLinear):
                module.quantised = on


def save(model: TorchLlama, folder: Path) -> None:
    """Writes config.json and model.safetensors (float32), as transformers reads them, into `folder`, which must exist.

    The config names the tokens 0 and 1 as ends of the text and of a turn.
    """
    s = model.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": [0, 1],
        "pad_token_id": 0,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.mlp,
        "max_position_embeddings": s.positions,
        "mlp_bias": False,
        "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": s.epsilon,
        "rope_scaling": None,
        "rope_theta": s.theta,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": s.vocab,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    state = {name: value.detach().float().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})


def load(folder: Path) -> TorchLlama:
    """Reads a model that `save` wrote."""
    config = json.loads((folder / "config.json").read_text())
    model = TorchLlama(
        Shape(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            mlp=config["intermediate_size"],
            positions=config["max_position_embeddings"],
            theta=config["rope_theta"],
            epsilon=config["rms_norm_eps"],
        )
    )
    model.load_state_dict(load_file(str(folder / "model.safetensors")))
    return model
