"""Train with the real Lightning; run by test_integrations.py in an environment of its own."""

import argparse
import os
import signal
import time

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from penstock.integrations.lightning import PenstockCheckpointIO, RandomStates

AVERAGES = {
    "none": lambda: [],
    "swa": lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=2)],
    "ema": lambda: [EMAWeightAveraging(decay=0.9)],
}


class Net(pl.LightningModule):
    """Dropout, batch statistics and shuffled data: everything that a resume can get wrong."""

    def __init__(self, width=16, rate=1e-2, loss=None):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, width),
            torch.nn.BatchNorm1d(width),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(width, 1),
        )

    def training_step(self, batch, number):
        return self._loss(batch)

    def validation_step(self, batch, number):
        self.log("val", self._loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), self.hparams.rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def _loss(self, batch):
        return (self.net(batch[0]) - batch[1]).square().mean()


def loader():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x.sum(1, True))
    return torch.utils.data.DataLoader(data, 8, shuffle=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--resume")
    parser.add_argument("--average", choices=AVERAGES, default="none")
    parser.add_argument("--bad", action="store_true")
    options = parser.parse_args()

    def kill(trainer, module):
        if trainer.current_epoch == options.kill_at:
            while not os.path.exists(os.path.join(options.folder, "latest")):
                time.sleep(0.01)  # one is durable
            os.kill(os.getpid(), signal.SIGKILL)

    pl.seed_everything(5, verbose=False)
    net = Net(loss=torch.nn.HuberLoss() if options.bad else None)
    checkpoint = ModelCheckpoint(
        options.folder, save_top_k=2, monitor="val", filename="{epoch}", save_last=True
    )
    trainer = pl.Trainer(
        max_epochs=6,
        accelerator="cpu",
        callbacks=[
            checkpoint,
            RandomStates(),
            LambdaCallback(on_train_epoch_start=kill),
            *AVERAGES[options.average](),
        ],
        plugins=[PenstockCheckpointIO()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, loader(), loader(), ckpt_path=options.resume)
    last = {"epoch": trainer.current_epoch, "weights": net.state_dict()}
    last["optimizer"] = trainer.optimizers[0].state_dict()
    last["best"] = [
        trainer.validate(net, loader(), ckpt_path="best")[0]["val"],
        checkpoint.best_model_path,
    ]
    torch.save(last, options.out)


if __name__ == "__main__":
    main()
