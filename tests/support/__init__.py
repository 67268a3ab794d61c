"""What tests share: routings, inputs that show mistakes, a float64 oracle, a pass criterion, a stand-in for a GPU."""
