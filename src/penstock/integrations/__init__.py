"""Penstock inside the training loops of others; each module needs the library it is named for."""
