"""Every operator of long code outside of modules is seen, and has an id of its own."""

from __future__ import annotations

import torch

import amanda

#: Methods that take nothing but the tensor.
_NAMES = ["abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "clone", "conj"]
_NAMES += ["cos", "cosh"]
_NAMES += ["deg2rad", "detach", "digamma", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fix"]
_NAMES += ["floor", "isfinite", "isneginf", "isposinf", "nan_to_num"]
_NAMES += ["frac", "isinf", "isnan", "lgamma", "log", "log10", "log1p", "log2", "logit", "mean"]
_NAMES += ["median", "neg", "positive", "prod", "rad2deg", "reciprocal", "relu", "round", "rsqrt"]
_NAMES += ["sgn", "sigmoid", "sign", "signbit", "sin", "sinc", "sinh", "sqrt", "square", "std"]
_NAMES += ["sum", "tan", "tanh", "trunc", "var"]


class Ids(amanda.Tool):
    """Note the type and id of each op that is analysed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        self.seen.append((context.op_type, context.get_op_id()))


def test_operators_of_several_types_at_hundreds_of_places_are_told_apart() -> None:
    # An op is found by its type and place: small numbers, which must not cancel each other out.
    names = _NAMES * 8
    code = compile("\n".join(f"a = x.{name}()" for name in names), "long_program.py", "exec")
    tool, variables = Ids(), {"x": torch.full((3,), 0.5)}
    with amanda.apply(tool):
        exec(code, variables)
    assert [op_type for op_type, _ in tool.seen] == names
    assert len({op_id for _, op_id in tool.seen}) == len(names)
