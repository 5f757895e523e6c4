"""What every part stands on: files, codecs, the pack container, bounded stages, memory, timing."""
