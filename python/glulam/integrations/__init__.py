"""Integrations that run other packages' mixture-of-experts models by Glulam's operators.

Other packages are imported only when an integration with them is used.
"""
