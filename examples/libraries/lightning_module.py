"""PyTorch Lightning trains a classifier of points; another process classifies with its newest weights.

python examples/libraries/lightning_module.py
"""

import lightning
import torch
from torch import multiprocessing as mp
from torch import nn

import wsync
from wsync.integrations.lightning import WsyncCallback

torch.set_num_threads(1)  # in both processes: with more, they would wait for each other's cores


class Classifier(lightning.LightningModule):
    """Says of points whether they are in the unit circle."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, _):
        return nn.functional.binary_cross_entropy_with_logits(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def points(count):
    """Points of the plane, and whether each is in the unit circle."""
    inputs = 3 * torch.rand(count, 2) - 1.5
    return inputs, (inputs.norm(dim=1, keepdim=True) < 1).float()


def classify(scheme):
    """Count right answers with each newer version, until the trainer shuts down."""
    model, (inputs, inside) = Classifier().model, points(1000)
    scheme.init_on_receiver("model", model=model, worker_idx=0)
    scheme.connect()
    while scheme.receive() is not None:  # waits for a newer version
        with wsync.gate():
            right = ((model(inputs) > 0) == inside.bool()).float().mean()
            print(f"version {scheme.version}: {right:.0%} right", flush=True)
    scheme.shutdown()


if __name__ == "__main__":
    module, scheme = Classifier(), wsync.SharedMemWeightSyncScheme(acknowledge="published")
    scheme.init_on_sender("model", model=module.model, num_workers=1)
    classifier = mp.get_context("spawn").Process(target=classify, args=(scheme,))
    classifier.start()
    scheme.connect(processes=[classifier])
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", callbacks=[WsyncCallback(scheme, every=32)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(*points(4096))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=64, shuffle=True))
    print(scheme.metrics)
    scheme.shutdown()
    classifier.join()
