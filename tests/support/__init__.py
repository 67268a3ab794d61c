"""Helpers that tests share.

They are routings, inputs that expose mistakes, a float64 oracle, a pass criterion, and a stand-in for a GPU.
"""
