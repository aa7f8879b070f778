"""Names of what torch does to a tensor, by what that is to a gradient, and what is known of a value."""

from __future__ import annotations

from enum import IntFlag


class Is(IntFlag):
    """What is known of a value. Nothing: it has nothing to do with gradients."""

    NOTHING = 0
    GRADIENT = 1  # depends on the gradient
    ALIAS = 2  # may share its memory
    BENT = 4  # not linear in it
    REDUCED = 8  # of all entries together
    UNCLEAR = 16
    NONE = 32
    PARAMETER = 64  # shares the memory of a parameter itself
    STORED = 128  # came from somebody's `.grad`


SHARED = Is.ALIAS | Is.PARAMETER | Is.STORED
# Nothing of the gradient itself.
LOOKS = {"dtype", "device", "shape", "ndim", "is_sparse", "is_cuda", "requires_grad", "layout", "itemsize", "name"}
LOOKS |= {"numel", "size", "dim", "element_size", "get_device", "stride", "nelement", "data_ptr", "is_floating_point"}
LOOKS |= {"register_hook", "retain_grad", "zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones"}
LOOKS |= {"is_contiguous", "_version", "is_leaf", "is_complex", "is_tensor", "is_coalesced"}
# The gradient, possibly in the same memory.
VIEWS = {"data", "grad", "T", "mT", "view", "reshape", "detach", "to", "float", "double", "half", "bfloat16", "cpu"}
VIEWS |= {"cuda", "type_as", "contiguous", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "t", "expand"}
VIEWS |= {"narrow", "select", "to_dense", "view_as", "reshape_as", "unflatten", "movedim", "swapaxes", "to_local"}
VIEWS |= {"index_select", "type", "numpy", "chunk", "split", "unbind", "expand_as", "ravel", "values", "coalesce"}
VIEWS |= {"asarray", "as_tensor", "from_numpy", "requires_grad"}
# Linear, in memory of its own.
COPIES = {"clone", "neg", "item", "tolist", "negative", "tensor", "stack", "cat", "repeat", "roll", "flip", "tril"}
COPIES |= {"triu", "diag"}
# Linear with what does not depend on the gradient; sums only among gradients.
PRODUCTS = {"mul", "multiply", "mm", "matmul", "bmm", "mv", "dot", "einsum", "index_add"}
QUOTIENTS = {"div", "divide", "true_divide"}
SUMS = {"add", "sub", "subtract"}
# Linear, of all entries together.
TOTALS = {"sum", "mean", "cumsum", "trace"}
# Not linear, of all entries together.
NORMS = {
    "norm",
    "std",
    "var",
    "max",
    "min",
    "amax",
    "amin",
    "median",
    "quantile",
    "logsumexp",
    "softmax",
    "any",
    "all",
}
NORMS |= {"argmax", "count_nonzero", "histc", "unique", "nonzero", "topk", "sort", "kthvalue", "normalize", "prod"}
NORMS |= {"vector_norm", "matrix_norm", "svd", "qr", "argsort", "argmin", "aminmax", "histogram", "allclose", "equal"}
# Not linear, entry by entry.
BENT = {"clamp", "clip", "clamp_min", "clamp_max", "sign", "sgn", "abs", "absolute", "sqrt", "rsqrt", "square", "pow"}
BENT |= {"exp", "log", "log1p", "tanh", "round", "floor", "ceil", "trunc", "sigmoid"}
BENT |= {"gt", "lt", "ge", "le", "eq", "ne", "relu", "threshold", "hardtanh", "softshrink", "hardshrink", "maximum"}
BENT |= {"minimum", "renorm", "softsign", "arctan", "atan", "bernoulli", "dropout", "fmod", "remainder", "reciprocal"}
# Whether there is anything that is no number.
FINITE = {"isnan", "isinf", "isfinite"}
# Another value in each call.
RANDOM = {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "bernoulli", "normal", "multinomial"}
RANDOM |= {"random", "uniform", "gauss", "randrange", "choice", "randperm", "normalvariate", "standard_normal"}
# Of containers, which keep what they are given.
KEEPS = {"append", "extend", "add", "insert", "setdefault", "put", "appendleft", "put_nowait", "update", "push"}
# Built in.
QUIET = {"print", "len", "isinstance", "id", "type", "str", "repr", "hasattr", "range", "format", "bool", "callable"}
NUMBERS = {"float", "int", "list", "tuple", "iter", "reversed", "zip", "enumerate", "dict", "next", "complex"}
# Of torch.nn.utils.
CLIPS = {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_"}
