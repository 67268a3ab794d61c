"""What of epilogues is Hopper's alone: loads and stores by TMA, transposed and quantised results, weight gradients."""
