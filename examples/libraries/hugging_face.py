"""A trainer of `transformers` (TRL's have the same callbacks) trains a small GPT-2; another process generates.

python examples/libraries/hugging_face.py
"""

import torch
from torch import multiprocessing as mp
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import wsync
from wsync.integrations.transformers import WsyncCallback

torch.set_num_threads(1)  # in both processes: with more, they would wait for each other's cores

CONFIG = GPT2Config(vocab_size=16, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=None)


def generate(scheme):
    """Continue the sequence 0, 1, 2 with each newer model, until the trainer shuts down."""
    model = GPT2LMHeadModel(CONFIG).eval()
    scheme.init_on_receiver("model", model=model, worker_idx=0)
    scheme.connect()
    prompt = torch.tensor([[0, 1, 2]])
    while scheme.receive() is not None:  # waits for a newer version
        with wsync.gate():  # one version for all tokens
            tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False)
            print(f"version {scheme.version}: {tokens[0].tolist()}", flush=True)
    scheme.shutdown()


if __name__ == "__main__":
    sequence = torch.arange(12)
    data = [{"input_ids": sequence, "labels": sequence}] * 256
    scheme = wsync.SharedMemWeightSyncScheme(acknowledge="published")
    arguments = TrainingArguments(
        "outputs/gpt2", per_device_train_batch_size=8, learning_rate=2e-3, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        GPT2LMHeadModel(CONFIG), arguments, train_dataset=data, callbacks=[WsyncCallback(scheme, every=8)]
    )
    scheme.init_on_sender("model", model=trainer.model, num_workers=1)
    generator = mp.get_context("spawn").Process(target=generate, args=(scheme,))
    generator.start()
    scheme.connect(processes=[generator])
    trainer.train()
    print(scheme.metrics)
    scheme.shutdown()
    generator.join()
