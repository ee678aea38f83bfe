"""Weights inside JAX and ONNX Runtime: what these models return is what the trainer's returns, version by version."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Trainer
from test_session import begin

import wsync_reader

MLP = """
class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 4)])
    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 5, 3), nn.LayerNorm(5), nn.Linear(5, 4)
    def forward(self, x):
        return self.head(self.norm(self.conv(x).amax((2, 3))))
def sent(x):
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    scheme.send()
    return made(torch.tensor(x)).tolist()
def begin(given, scheme):
    scheme.init_on_sender('policy', model=given, num_workers=1)
    return given, scheme
"""
X = [[0.5, -1.0, 2.0], [1.0, 0.0, -3.0]]


def address(trainer: Trainer, kind: str) -> str:
    given = trainer.do(MLP + f"made, scheme = begin({kind}(), wsync.MultiProcessWeightSyncScheme())\nscheme.address")
    trainer.begin("scheme.connect()")
    return given


def test_equinox(trainer: Trainer) -> None:
    eqx, jax = pytest.importorskip("equinox"), pytest.importorskip("jax")
    from wsync_reader.jax import fill, nested

    model = eqx.nn.MLP(3, 4, 8, 2, key=jax.random.key(0))
    with wsync_reader.open(address(trainer, "Mlp")) as reader:
        trainer.end()
        for _ in range(3):
            expected = trainer.do(f"sent({X})")
            with reader.weights() as weights:
                filled = fill(model, weights)
                tree = nested(weights)
            assert np.allclose(jax.vmap(filled)(np.array(X, np.float32)), expected, atol=1e-5)
            assert filled.layers[1].weight.tobytes() == weights["layers.1.weight"].tobytes()
            assert tree["layers"]["2"]["bias"].tobytes() == weights["layers.2.bias"].tobytes()
        other = eqx.nn.MLP(3, 4, 9, 2, key=jax.random.key(0))
        with pytest.raises(wsync_reader.LayoutMismatch, match=r"'layers.0.weight' of version 4 is float32\[8, 3\]"):
            fill(other, weights)
        with pytest.raises(wsync_reader.LayoutMismatch, match="no weight 'log_std' for 'log_std'"):
            fill({"log_std": np.zeros(4, np.float32)}, weights)
    trainer.do("scheme.shutdown()")


def test_flax(trainer: Trainer) -> None:
    nn, jax = pytest.importorskip("flax.linen"), pytest.importorskip("jax")
    from wsync_reader.jax import fill

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(5, (3, 3), padding="VALID")(x).max((1, 2))
            return nn.Dense(4)(nn.LayerNorm(epsilon=1e-5)(x))

    names = {"Conv_0": "conv", "LayerNorm_0": "norm", "Dense_0": "head", "kernel": "weight", "scale": "weight"}

    def name_of(path: str) -> str:
        return ".".join(names.get(part, part) for part in path.split(".")[1:])

    images = np.random.default_rng(0).normal(size=(2, 2, 6, 6)).astype(np.float32)
    last = images.transpose(0, 2, 3, 1)
    params = Net().init(jax.random.key(0), last)
    with wsync_reader.open(address(trainer, "Net")) as reader:
        trainer.end()
        for _ in range(3):
            expected = trainer.do(f"sent({images.tolist()})")
            with reader.weights() as weights:
                filled = fill(params, weights, name_of)
            assert np.allclose(Net().apply(filled, last), expected, atol=1e-4)
    trainer.do("scheme.shutdown()")


def mlp_file(path: Path) -> None:
    from onnx import TensorProto, helper, numpy_helper, save

    nodes, initialisers, at = [], [], "x"
    for index, (inner, outer) in enumerate([(3, 8), (8, 8), (8, 4)]):
        weight, bias = f"layers.{index}.weight", f"layers.{index}.bias"
        initialisers += [numpy_helper.from_array(np.zeros((outer, inner), np.float32), weight)]
        initialisers += [numpy_helper.from_array(np.zeros(outer, np.float32), bias)]
        nodes.append(helper.make_node("Gemm", [at, weight, bias], [f"h{index}"], transB=1))
        at = f"h{index}"
        if index < 2:
            nodes.append(helper.make_node("Relu", [at], [f"r{index}"]))
            at = f"r{index}"
    ends = [helper.make_tensor_value_info(one, TensorProto.FLOAT, ["n", size]) for one, size in (("x", 3), ("h2", 4))]
    graph = helper.make_graph(nodes, "mlp", ends[:1], ends[1:], initialisers)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))


def test_onnx_runtime(trainer: Trainer, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    from wsync_reader.onnx import OnnxModel

    mlp_file(tmp_path / "mlp.onnx")
    model = OnnxModel(tmp_path / "mlp.onnx")
    inputs = {"x": np.array(X, np.float32)}
    assert model.version == 0 and not model.run(inputs)[0].any()
    with wsync_reader.open(address(trainer, "Mlp")) as reader:
        trainer.end()
        for _ in range(3):
            expected = trainer.do(f"sent({X})")
            with reader.weights() as weights:
                model.install(weights)
            assert model.version == weights.version and np.allclose(model.run(inputs)[0], expected, atol=1e-5)
        renamed = OnnxModel(tmp_path / "mlp.onnx", {"layers.0.weight": "layers.2.weight"})
        with pytest.raises(wsync_reader.LayoutMismatch, match=r"float32\[8, 3\], not float32\[4, 8\]"):
            renamed.install(weights)
        assert renamed.version == 0 and not renamed.run(inputs)[0].any()
    trainer.do("scheme.shutdown()")


def test_bfloat16_in_onnx_runtime(trainer: Trainer, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    from onnx import TensorProto, helper, save

    from wsync_reader.onnx import OnnxModel

    zeros = [helper.make_tensor("small", TensorProto.BFLOAT16, [7], [0.0] * 7)]
    nodes = [helper.make_node("Cast", ["small"], ["wide"], to=1), helper.make_node("Add", ["wide", "x"], ["y"])]
    ends = [helper.make_tensor_value_info(one, TensorProto.FLOAT, [7]) for one in ("x", "y")]
    graph = helper.make_graph(nodes, "wider", ends[:1], ends[1:], zeros)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(tmp_path / "m.onnx"))
    model = OnnxModel(tmp_path / "m.onnx", {"small": "small"})
    with wsync_reader.open(begin(trainer)) as reader:
        trainer.end()
        trainer.do("scheme.send(fill(made, 0.5))")
        with reader.weights() as weights:
            model.install(weights)
        assert model.run({"x": np.zeros(7, np.float32)})[0].tolist() == [0.5] * 7
    trainer.do("scheme.shutdown()")


def test_onnx_runtime_is_never_mixed_while_it_is_switched(trainer: Trainer, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper, save

    from wsync_reader.onnx import OnnxModel

    names = ["0.weight", "1.weight"]
    zeros = [numpy_helper.from_array(np.zeros((64, 64), np.float32), one) for one in names]
    ends = [helper.make_tensor_value_info(one, TensorProto.FLOAT, [64, 64]) for one in ("x", "y", "z")]
    nodes = [helper.make_node("Sub", names, ["d"]), helper.make_node("Add", ["x", "d"], ["y"])]
    nodes += [helper.make_node("Neg", names[:1], ["n"]), helper.make_node("Add", ["x", "n"], ["z"])]
    graph = helper.make_graph(nodes, "difference", ends[:1], ends[1:], zeros)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    save(made, str(tmp_path / "difference.onnx"))
    model = OnnxModel(tmp_path / "difference.onnx", dict(zip(names, names, strict=True)))
    inputs = np.zeros((64, 64), np.float32)
    seen, values, stop = set[float](), set[float](), threading.Event()

    def act() -> None:
        while not stop.is_set():
            difference, negated = model.run({"x": inputs})
            seen.update(np.unique(difference).tolist())
            values.update(np.unique(negated).tolist())

    acting = threading.Thread(target=act)
    with wsync_reader.open(begin(trainer)) as reader:
        trainer.end()
        acting.start()
        trainer.begin("for value in range(2, 60):\n    scheme.send(fill(made, value))\n0")
        while model.version < 59:
            received = reader.receive(20.0)
            assert received is not None
            model.install(received)
        stop.set()
        acting.join()
        assert trainer.end() == 0 and seen == {0.0} and len(values) > 3 and min(values) >= -59.0
        assert model.run({"x": inputs})[1].tolist() == (inputs - 59.0).tolist()
    trainer.do("scheme.shutdown()")
