"""The simulator and the training loop, beside eager torch and TorchRL."""
