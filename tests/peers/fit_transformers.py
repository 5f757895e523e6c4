"""Train with the real Trainer of transformers; run by test_integrations.py."""

import argparse
import os
import signal

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from penstock.integrations.transformers import PenstockCallback, resume


class Sentences(torch.utils.data.Dataset):
    """Random words; the sum of them says the class."""

    def __init__(self):
        self.words = torch.randint(1, 30, (48, 6), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return {"input_ids": self.words[i], "labels": self.words[i].sum() % 2}


class Kill(TrainerCallback):
    """Ends the process, without a word."""

    def __init__(self, at):
        self.at = at

    def on_step_begin(self, args, state, control, **training):
        if state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--resume")
    options = parser.parse_args()
    set_seed(3)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
        )
    )
    arguments = TrainingArguments(
        output_dir=f"{options.out}-trainer",
        num_train_epochs=3,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        save_strategy="no",
        logging_steps=7,
        eval_strategy="steps",
        eval_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=[
            PenstockCallback(options.folder, save_steps=5, keep_last=3),
            Kill(options.kill_at),
        ],
    )
    if options.resume:
        resume(trainer, options.resume)
    else:
        trainer.train()
    log = [
        {k: v for k, v in row.items() if "runtime" not in k and "second" not in k}
        for row in trainer.state.log_history
    ]
    last = {"step": trainer.state.global_step, "weights": model.state_dict(), "log": log[:-1]}
    last["optimizer"] = trainer.optimizer.state_dict()
    torch.save(last, options.out)


if __name__ == "__main__":
    main()
