"""LeRobot datasets on disk, v3.0 and v2.1: units, the files built from them, reading, checking."""
