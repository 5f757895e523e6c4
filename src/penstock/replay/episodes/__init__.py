"""DictReplayBuffer: episodes of dicts, compressed, with an index and partial reads."""
