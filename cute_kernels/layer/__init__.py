"""What lies around a layer's experts: which tokens go where, and the sums that come back."""
