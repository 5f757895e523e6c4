"""Pictures, depth and video: the only place of FFmpeg."""
