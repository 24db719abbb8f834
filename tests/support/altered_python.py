"""What a `sitecustomize.py` may do to a process of Python before its program begins."""

WITHOUT_ONNX = """
import importlib.util as util
find = util.find_spec
util.find_spec = lambda name, *more: None if name == "onnx" else find(name, *more)
"""

SLOW_DISK = """
import os, time
fsync = os.fsync

def slow(*arguments):
    time.sleep(1)
    return fsync(*arguments)

os.fsync = slow
"""
