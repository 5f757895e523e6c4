"""The plug-ins for TorchRL: a storage that compresses, and samplers over our own sum tree."""
