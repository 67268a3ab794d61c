"""Other packages' mixture-of-experts models on Glulam. Each module imports its package when it is asked to register."""
