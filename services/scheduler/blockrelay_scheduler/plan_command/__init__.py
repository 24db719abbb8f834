"""`blockrelay plan`: decides, explains and compares plans without a cell, and gives a running cell another plan."""
