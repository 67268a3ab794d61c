"""Integrations that run other packages' mixture-of-experts models on Glulam; packages are imported only when used."""
