"""Helpers that tests share: routings, inputs that expose mistakes, a float64 oracle, a pass criterion, a stand-in for a
GPU.
"""
