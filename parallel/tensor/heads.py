"""Projections to the heads of attention: queries, keys and values.

Heads are grouped if several heads of queries share one head of keys and values:

    8 heads of queries, 2 of keys and values       q0 q1 q2 q3 | q4 q5 q6 q7       k0 v0 | k1 v1
    tensor size 2, split like every weight         rank 0        rank 1            rank 0  rank 1
    tensor size 4, keys and values replicated      0     1       2     3           0 and 1 2 and 3 apply it

If the ranks are more than the heads of keys and values, every rank has the weights of all of these and applies one head
of them. So ranks that share a head compute parts of its gradient, which are summed over the axis.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from parallel.tensor.layers import Linears, column_linears, part_of
from parallel.tensor.products import OWN_PRECISION, Products
from parallel.tensor.token_layout import TokenLayout


class PackedHeads(nn.Module):
    """A projection, (tokens of this rank, in) -> queries, keys and values, (batch, seq, own heads, head_dim) each.

    Rows are ordered (head, q | k | v, head_dim), so that equal parts of the rows are whole heads. `traced` is as for a
    column-parallel layer.
    """

    split_dims: ClassVar = {"weight": 0, "bias": 0}
    traced: Linears | None = None
    products: Products = OWN_PRECISION

    def __init__(self, in_features: int, num_heads: int, head_dim: int, tokens: TokenLayout, has_bias: bool):
        super().__init__()
        self.tokens, self.head_dim = tokens, head_dim
        self.packed_rows = {"weight": (head_dim,) * 3}
        num_rows = 3 * part_of(num_heads, tokens.axis, "the number of heads") * head_dim
        self.weight = nn.Parameter(torch.empty(num_rows, in_features))
        self.bias = nn.Parameter(torch.empty(num_rows)) if has_bias else None

    def forward(self, x: Tensor, num_sequences: int) -> tuple[Tensor, ...]:
        biases = [] if self.bias is None else [self.bias]
        (qkv,) = column_linears(x, [self.weight], biases, self)
        return qkv.unflatten(0, (num_sequences, -1)).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)


class GroupedHeads(nn.Module):
    """A projection as `PackedHeads`, to fewer heads of keys and values than of queries.

    Rows of `kv_weight` are ordered (head, k | v, head_dim). The size of the axis must divide the number of heads of
    keys and values, or be a multiple of it. `traced` is as for a column-parallel layer.
    """

    traced: Linears | None = None
    products: Products = OWN_PRECISION
    dims: ClassVar = {"q_weight": 0, "q_bias": 0, "kv_weight": 0, "kv_bias": 0}

    def __init__(
        self, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, tokens: TokenLayout, has_bias: bool
    ):
        super().__init__()
        axis = self.axis = tokens.axis
        self.tokens, self.head_dim = tokens, head_dim
        self.rows_of_head = 2 * head_dim  # of keys and values: those that a rank applies of a weight that ranks share
        is_shared = axis.size > num_kv_heads and axis.size % num_kv_heads == 0
        self.ranks_per_head = axis.size // num_kv_heads if is_shared else 1
        own_kv_heads = num_kv_heads if is_shared else part_of(num_kv_heads, axis, "the number of heads of keys")
        rows = part_of(num_heads, axis, "the number of heads") * head_dim, 2 * own_kv_heads * head_dim
        self.q_weight, self.kv_weight = (nn.Parameter(torch.empty(size, in_features)) for size in rows)
        self.q_bias, self.kv_bias = (nn.Parameter(torch.empty(size)) if has_bias else None for size in rows)
        self.packed_rows = {"q_weight": (head_dim,), "kv_weight": (head_dim,) * 2}
        self.shared_dims = {name: dim for name, dim in self.dims.items() if is_shared and name.startswith("kv")}
        self.split_dims = {name: dim for name, dim in self.dims.items() if name not in self.shared_dims}

    def forward(self, x: Tensor, num_sequences: int) -> tuple[Tensor, ...]:
        weights = [self.q_weight, self._own(self.kv_weight)]
        biases = [] if self.q_bias is None or self.kv_bias is None else [self.q_bias, self._own(self.kv_bias)]
        products = column_linears(x, weights, biases, self)
        q, kv = (product.unflatten(0, (num_sequences, -1)) for product in products)
        return q.unflatten(-1, (-1, self.head_dim)), *kv.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)

    def _own(self, of_keys_and_values: Tensor) -> Tensor:
        """Return the rows that this rank applies."""
        if self.ranks_per_head == 1:
            return of_keys_and_values
        first = self.axis.rank // self.ranks_per_head * self.rows_of_head
        return of_keys_and_values[first:][: self.rows_of_head]
