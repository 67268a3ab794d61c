"""Hopper's own parts of epilogues: loads and stores by TMA, transposed and quantised results, weight gradients."""
