"""Recordings: any ROS 1 or ROS 2 bag, read with bounded memory and without ROS."""

from penstock.bags.find import find_bags, open_bag, to_path
from penstock.bags.limits import Limits
from penstock.bags.messages import Decoder
from penstock.bags.reader import Bag, Message, SalvageReport, Topic
from penstock.media.encodings import ImageMessage

__all__ = [
    "Bag",
    "Decoder",
    "ImageMessage",
    "Limits",
    "Message",
    "SalvageReport",
    "Topic",
    "find_bags",
    "open_bag",
    "to_path",
]
