"""LeRobot datasets on disk, v3.0 and v2.1, without lerobot and without torch.

layout.py knows the paths and schemas; images.py, depth.py and video.py know pixels; stats.py sums;
episode.py stages one episode; writer.py commits it; reader.py and doctor.py read and check.
"""
