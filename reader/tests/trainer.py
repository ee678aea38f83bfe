"""A trainer in a process of its own, by another Python, which has torch: it runs what it is told, line by line."""

import ast
import hashlib
import json
import sys
import traceback

import torch
from torch import nn

import wsync


def model(value: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model whose weights all have one value; two of them are tied, one is transposed, one is bfloat16."""
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    made.tied = made[1]
    made.register_buffer("turned", torch.zeros(5, 6).t())
    made.register_buffer("small", torch.zeros(7, dtype=torch.bfloat16))
    made.register_buffer("count", torch.zeros((), dtype=torch.int64))
    made.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
    return fill(made, value)


def fill(made: nn.Module, value: float) -> nn.Module:
    """Set all weights to one value."""
    with torch.no_grad():
        for tensor in [*made.parameters(), *made.buffers()]:
            tensor.fill_(value)
    return made


def scatter(made: nn.Module) -> dict[str, str]:
    """Set all weights to random values; return digests of the bytes."""
    with torch.no_grad():
        for tensor in [*made.parameters(), *made.buffers()]:
            tensor.copy_(torch.randint(-100, 100, tensor.shape) / 7)
    return digests(made)


def nudge(made: nn.Module, rows: int = 1) -> dict[str, str]:
    """Set some rows of two weights to random values; return digests of the bytes."""
    with torch.no_grad():
        for one in made[0], made[1]:
            one.weight[:rows] = torch.rand(rows, 64)
        made.count += 1
    return digests(made)


def digests(made: nn.Module) -> dict[str, str]:
    """Return digests of the bytes of all weights."""
    return {
        name: hashlib.sha256(one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, one in made.state_dict().items()
    }


names = {"torch": torch, "nn": nn, "wsync": wsync, "model": model, "fill": fill, "scatter": scatter, "nudge": nudge}
print(json.dumps({"number": 0}), flush=True)
for line in sys.stdin:
    result = error = None
    number, code = json.loads(line)
    try:
        body = ast.parse(code).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), "told", "exec"), names)
        if last is not None:
            result = eval(compile(ast.Expression(last.value), "told", "eval"), names)
    except Exception as raised:  # noqa: BLE001  told to the test
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    print(json.dumps({"number": number, "result": result, "error": error}, default=str), flush=True)
